"""ShadowStore: a KV cache that holds, instead of keys and values, a note for which prefix each slot was written.

A slot's note is (position, hash of the prefix that ends with its token, the hash before its token). A reader walks its
block table: every visible slot must carry its own position, and every hash must continue the one before it. So lawful
sharing passes, and an unwritten, stale or foreign slot raises. It is told slots and tokens; it knows no requests.

`tainted` marks slots whose numbers would not be finite, so that tests see where such numbers go.
"""

import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError

_MASK = (1 << 64) - 1
I32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]


class ShadowError(HeadraceError):
    """A step read or wrote KV that is not its own: the scheduler or its index arithmetic is wrong."""


def root_hash(adapter_id: int) -> int:
    """The hash of the empty prefix."""
    return next_hash(0x68656164, adapter_id)


def next_hash(prefix_hash: int, token_id: int) -> int:
    """The hash of a prefix with one more token: 64 bits, mixed as in splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = (prefix_hash + 0x9E3779B97F4A7C15 * (token_id + 1)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


class ShadowStore:
    """The slots of one KV group. `window`: tokens a query sees, itself included; 0: all."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        num_slots = num_blocks * block_size
        self.block_size = block_size
        self.window = window
        self.position = np.full(num_slots, -1, np.int32)
        self.hash = np.zeros(num_slots, np.uint64)
        self.parent = np.zeros(num_slots, np.uint64)
        self.tainted = np.zeros(num_slots, np.bool_)
        self._is_read = np.zeros(num_slots, np.bool_)

    def copy(self, source: int, destination: int) -> None:
        """Copies a whole block."""
        old, new = self._block(source), self._block(destination)
        for array in (self.position, self.hash, self.parent, self.tainted):
            array[new] = array[old]

    def visible_slots(self, table: I32, start: int) -> I32:
        """Slots of the positions before `start` that a query at `start` sees. Raises ShadowError."""
        first = max(0, start - self.window + 1) if self.window else 0
        positions = np.arange(first, start, dtype=np.int32)
        blocks = table[positions // self.block_size]
        if (blocks < 0).any():
            raise ShadowError(f"position {positions[blocks < 0][0]} is visible from {start} and has no KV block")
        slots: I32 = blocks * np.int32(self.block_size) + positions % np.int32(self.block_size)
        return slots

    def read(self, slots: I32, start: int, root: int) -> tuple[int, bool]:
        """Checks the visible prefix before `start` (at least one slot). Returns its hash and whether it is tainted."""
        expected = np.arange(start - len(slots), start)
        found = self.position[slots]
        if (found != expected).any():
            at = int(np.flatnonzero(found != expected)[0])
            raise ShadowError(f"slot {slots[at]} is read for position {expected[at]} and holds position {found[at]}")
        hashes, parents = self.hash[slots], self.parent[slots]
        broken = np.flatnonzero(parents[1:] != hashes[:-1])
        if len(broken):
            raise ShadowError(f"slot {slots[broken[0] + 1]} continues another prefix at position {broken[0] + 1}")
        if len(slots) == start and int(parents[0]) != root:
            raise ShadowError(f"slot {slots[0]} begins another prefix")
        return int(hashes[-1]), bool(self.tainted[slots].any())

    def write(self, slots: I32, start: int, hashes: list[int], before: int, tainted: bool) -> None:
        """Notes positions [start, start + n): `hashes` of the prefixes that end there, `before` of the one before."""
        self.position[slots] = np.arange(start, start + len(slots))
        self.hash[slots] = hashes
        self.parent[slots] = [before, *hashes[:-1]]
        self.tainted[slots] = tainted

    def check_disjoint(self, read: I32, written: I32) -> None:
        """No slot that a step reads as past may be written in the same step. Raises ShadowError."""
        self._is_read[read] = True
        clash = written[self._is_read[written]]
        self._is_read[read] = False
        if len(clash):
            raise ShadowError(f"slot {clash[0]} is written in the same step in which another sequence reads it")

    def dump(self, ids: I32) -> bytes:
        """The notes of whole blocks."""
        slots = self._slots(ids)
        return b"".join(array[slots].tobytes() for array in (self.position, self.hash, self.parent, self.tainted))

    def load(self, ids: I32, data: bytes) -> None:
        """What `dump` gave, into other blocks. Raises ShadowError when the size is wrong."""
        slots = self._slots(ids)
        offset = 0
        arrays = (self.position, self.hash, self.parent, self.tainted)
        expected = sum(array.itemsize * len(slots) for array in arrays)
        if len(data) != expected:
            raise ShadowError(f"{len(ids)} KV blocks are {expected} bytes, not {len(data)}")
        for array in arrays:
            array[slots] = np.frombuffer(data, array.dtype, len(slots), offset)
            offset += array.itemsize * len(slots)

    def _block(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def _slots(self, ids: I32) -> npt.NDArray[np.int64]:
        offsets = np.arange(self.block_size)
        slots: npt.NDArray[np.int64] = (ids[:, np.newaxis] * self.block_size + offsets).ravel()
        return slots
