"""What turns text into ids behind Tokenizer: the `tokenizers` library, or our own loops around special tokens.

Neither adds begin or end tokens. `parse_special` says whether texts of control tokens become those tokens: yes for a
rendered chat prompt, no for text that a stranger wrote and that must stay text.
"""

from collections.abc import Callable
from typing import Protocol

import tokenizers

from headrace.text.special import SpecialSplitter


class TextEncoder(Protocol):
    def encode(self, text: str, parse_special: bool) -> list[int]: ...


class LibraryEncoder:
    """Encodes with a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, size: int | None = None) -> None:
        """`size`: ids from here on are dropped; they stand for bytes that the vocabulary lacks."""
        self._tokenizer = tokenizer
        self._size = size
        self._plain: tokenizers.Tokenizer | None = None  # made when first needed: most servers never need it

    def encode(self, text: str, parse_special: bool) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._without_special()
        # The batch call releases the GIL and skips the offsets; the single one does neither.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids if self._size is None else [i for i in ids if i < self._size]

    def _without_special(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            # A copy, because the switch is a property of the tokenizer that other threads are using.
            plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain


class FragmentEncoder:
    """Cuts the text at special tokens and encodes what lies between with `encode_text`."""

    def __init__(
        self,
        encode_text: Callable[[str], list[int]],
        every_special: SpecialSplitter,
        user_defined: SpecialSplitter,
        prefix: str = "",
    ) -> None:
        """`user_defined` cuts even when special tokens are not parsed. `prefix` goes before a text at the beginning or
        after a special token."""
        self._encode_text = encode_text
        self._every_special = every_special
        self._user_defined = user_defined
        self._prefix = prefix

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        prefix = self._prefix
        for fragment in (self._every_special if parse_special else self._user_defined).split(text):
            if isinstance(fragment, int):
                ids.append(fragment)
                prefix = self._prefix
            else:
                ids.extend(self._encode_text(prefix + fragment))
                prefix = ""
        return ids
