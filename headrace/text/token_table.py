"""The exact bytes of each token, for every kind of vocabulary.

Three alphabets: byte-level BPE (one printable character a byte), SentencePiece-style ("▁" is a space, "<0x41>" a byte)
and WordPiece with "##". Tokens in `literal_ids` stand for their own text whatever the alphabet.
"""

from collections.abc import Callable
from enum import Enum

from headrace.text.byte_level import letters_to_bytes
from headrace.text.sentencepiece import SPACE, byte_of_piece


class Alphabet(Enum):
    BYTE_LEVEL = "byte level"
    SPACE_MARK = "space mark"
    HASH_MARK = "hash mark"


class TokenTable:
    """id -> bytes, converted when first asked and remembered."""

    def __init__(
        self, size: int, text_of: Callable[[int], str | None], alphabet: Alphabet, literal_ids: frozenset[int]
    ) -> None:
        self._text_of = text_of
        self._alphabet = alphabet
        self._literal_ids = literal_ids
        self._bytes: list[bytes | None] = [None] * size

    def __len__(self) -> int:
        return len(self._bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id outside the vocabulary: models pad their output layer with ids that mean nothing."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        data = self._bytes[token_id]
        if data is None:
            data = self._bytes[token_id] = self._convert(token_id)
        return data

    def _convert(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        if text is None:
            return b""
        if token_id in self._literal_ids:
            return text.encode("utf-8", "replace")
        if self._alphabet is Alphabet.BYTE_LEVEL:
            return letters_to_bytes(text)
        if self._alphabet is Alphabet.HASH_MARK:
            return (text[2:] if text.startswith("##") else " " + text).encode("utf-8", "replace")
        byte = byte_of_piece(text)
        return bytes([byte]) if byte is not None else text.replace(SPACE, " ").encode("utf-8", "replace")
