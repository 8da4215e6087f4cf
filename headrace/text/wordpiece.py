"""WordPiece as GGUF's "bert" model does it: words by space and punctuation, then the longest known piece from the left.

In GGUF a piece that begins a word starts with "▁" and a continuation has no mark.
"""

import unicodedata
from collections.abc import Mapping

from headrace.text.sentencepiece import SPACE

# The upper bound 0x2CEAF and lower bound 0x2B920 are those of the published tokenizers.
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPieceEncoder:
    """Text -> ids for one lower-casing vocabulary."""

    def __init__(self, ids: Mapping[str, int], unknown_id: int) -> None:
        self._ids = dict(ids)
        self._unknown_id = unknown_id
        self._longest = max(map(len, self._ids), default=0)

    def encode(self, text: str) -> list[int]:
        return [token_id for word in _words(text) for token_id in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        word = SPACE + word
        ids: list[int] = []
        start = 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                token_id = self._ids.get(word[start:end])
                if token_id is not None:
                    break
            else:
                return [self._unknown_id]
            ids.append(token_id)
            start = end
        return ids


def _words(text: str) -> list[str]:
    """Lower-cased, accent-free words; each punctuation mark and each Chinese character is a word."""
    words = [""]
    for char in text:
        # The base character of a decomposition, as the format's reference reader takes it, even of a Hangul syllable.
        base = unicodedata.normalize("NFD", char)[0]
        category = unicodedata.category(base)
        if category == "Cc" and base not in "\t\n\v\f\r\x85":
            continue
        if base.isspace() or category.startswith("Z"):
            words.append("")
        elif base == "\ufffd" or category in ("Cf", "Co", "Cs") or category.startswith("M"):
            continue
        elif category.startswith("P") or (base < "\x7f" and category.startswith("S")) or _is_chinese(base):
            words.extend((base.lower(), ""))
        else:
            words[-1] += base.lower()
    return [word for word in words if word]


def _is_chinese(char: str) -> bool:
    return any(low <= ord(char) <= high for low, high in _CHINESE)
