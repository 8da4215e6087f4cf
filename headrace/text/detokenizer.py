"""Incremental detokenising: token ids in, text out, never half a character.

Bytes are held only while they may still become a character; bytes that cannot are U+FFFD at once. However the ids are
split, the pieces of text add up to `Tokenizer.decode` of all of them. Knows no stop strings.
"""

import codecs
from collections.abc import Sequence

from headrace.text.tokenizer import Tokenizer

_MOST_UNFINISHED = 3  # bytes that a character can have before its last one


class Detokenizer:
    """The text of one growing sequence."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """The text continues the prompt's: its first space belongs to it unless no text came before, and a character
        that the prompt left unfinished is completed."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = all(tokenizer.is_special(i) for i in prompt_token_ids)
        self._decoder.decode(self._tail(prompt_token_ids))

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        special = self._tokenizer.is_special(token_id)
        if special and self._skip:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and not special:
            self._at_start = False
            data = self._tokenizer.without_leading_space(data)
        return self._decoder.decode(data)

    def _tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to hold whatever character it leaves unfinished."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if not self._tokenizer.is_special(token_id):
                tail = self._tokenizer.token_bytes(token_id) + tail
            elif not self._skip:
                break
            if len(tail) >= _MOST_UNFINISHED:
                break
        return tail

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._decoder.decode(b"", final=True)
