"""SentencePiece-style tokenising as GGUF's "llama" model does it: merge the adjacent pair whose union scores best.

The rule: start from single characters; while some adjacent pair joins to a known piece, join the pair whose piece has
the highest score, the leftmost on a tie; characters that are no piece become byte tokens. Equal scores are common
(Gemma gives all its space runs the same), so a rank per pair, which is what the `tokenizers` BPE model needs, cannot
express the rule; this loop does, in O(n log n).

Invariant: cutting the text where no piece can span the cut changes nothing, so words are tokenised apart and cached.
Does not know special tokens or the leading space: the caller cuts and prefixes.
"""

import re
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

SPACE = "▁"  # how pieces write a space

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHED_LENGTH = 48  # characters of a word worth remembering
_CACHE_ENTRIES = 1 << 16


def byte_of_piece(text: str) -> int | None:
    """The byte that a byte token such as "<0x41>" stands for; None for any other text."""
    match = _BYTE_PIECE.fullmatch(text)
    return int(match[1], 16) if match else None


class SentencePieceEncoder:
    """Text -> ids for one vocabulary. Safe to share between threads."""

    def __init__(
        self,
        pieces: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Mapping[int, int],
        unknown_id: int | None,
    ) -> None:
        """`pieces`: text -> id of everything that merging may produce; `scores`: by id; `byte_ids`: byte -> id.

        A byte without a token becomes `unknown_id`, or nothing when that is None.
        """
        self._pieces = dict(pieces)
        self._costs = {text: -scores[i] for text, i in pieces.items()}
        self._byte_ids = dict(byte_ids)
        self._unknown_id = unknown_id
        self._cut = _cut_pattern(pieces)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        cache = self._cache
        for word in self._cut.split(text.replace(" ", SPACE)):
            known = cache.get(word)
            if known is None:
                known = self._encode_word(word)
                if len(word) <= _CACHED_LENGTH:
                    if len(cache) >= _CACHE_ENTRIES:
                        cache.clear()
                    cache[word] = known
            ids.extend(known)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        whole = self._pieces.get(word)
        if whole is not None and len(word) == 1:
            return [whole]
        ids: list[int] = []
        for symbol in self._merge(word):
            token_id = self._pieces.get(symbol)
            if token_id is not None:
                ids.append(token_id)
                continue
            for byte in symbol.encode("utf-8"):
                byte_id = self._byte_ids.get(byte, self._unknown_id)
                if byte_id is not None:
                    ids.append(byte_id)
        return ids

    def _merge(self, word: str) -> list[str]:
        """The symbols left when no pair joins. `symbols[i]` is "" once symbol i was swallowed by the one before it."""
        costs = self._costs
        symbols = list(word)
        count = len(symbols)
        previous = list(range(-1, count - 1))
        following = [*range(1, count), -1]
        # (cost, left, right, length of the union): a stale entry has a swallowed side or another length.
        queue = [(costs[pair], i, i + 1, 2) for i in range(count - 1) if (pair := symbols[i] + symbols[i + 1]) in costs]
        heapify(queue)
        while queue:
            _, left, right, length = heappop(queue)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue
            union = symbols[left] = symbols[left] + symbols[right]
            symbols[right] = ""
            after = following[left] = following[right]
            before = previous[left]
            if after >= 0:
                previous[after] = left
                joined = union + symbols[after]
                if joined in costs:
                    heappush(queue, (costs[joined], left, after, len(joined)))
            if before >= 0:
                joined = symbols[before] + union
                if joined in costs:
                    heappush(queue, (costs[joined], before, left, len(joined)))
        return [symbol for symbol in symbols if symbol]


def _cut_pattern(pieces: Mapping[str, int]) -> re.Pattern[str]:
    """Matches (with no width) before each space that no piece can span together with the character before it."""
    joined = "\0".join(pieces)
    glued = {c for c in re.findall(f"(?s)(.)(?={SPACE})", joined) if c != "\0"}
    inside = "".join(re.escape(c) for c in sorted(glued))
    return re.compile(f"(?s)(?<=[^{inside}])(?={SPACE})" if inside else f"(?s)(?<=.)(?={SPACE})")
