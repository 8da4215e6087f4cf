"""Incremental detokenising: token ids in, text out, never half a character.

Bytes are held only while they may still become a character; bytes that cannot are U+FFFD at once. However the ids are
split, the pieces of text add up to `Tokenizer.decode` of all of them. Knows no stop strings.
"""

import codecs
from collections.abc import Sequence

from headrace.text.tokenizer import Tokenizer

# Tokens of the prompt that can hold an unfinished character: it has at most 3 bytes before its last one.
_TAIL = 4


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
        for token_id in prompt_token_ids[-_TAIL:]:
            if not tokenizer.is_special(token_id):
                self._decoder.decode(tokenizer.token_bytes(token_id))

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

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._decoder.decode(b"", final=True)
