"""BlockTable: the blocks of one sequence in one KV group, in order of position.

    [0, first)        -1: left the window and was let go
    [first, length)   block ids; block i holds positions [i * block_size, (i + 1) * block_size)

A growing int32 array and not a list, because a step copies whole tables into its Batch.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class BlockTable:
    __slots__ = ("_ids", "first", "length")

    def __init__(self, blocks: Iterable[int] = (), first: int = 0) -> None:
        self._ids = np.fromiter(blocks, np.int32)
        self.length = len(self._ids)
        self.first = first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(self._ids[index])

    @property
    def num_live(self) -> int:
        return self.length - self.first

    @property
    def view(self) -> npt.NDArray[np.int32]:
        return self._ids[: self.length]

    def append(self, block: int) -> None:
        if self.length == len(self._ids):
            grown = np.full(max(8, 2 * self.length), -1, np.int32)
            grown[: self.length] = self._ids
            self._ids = grown
        self._ids[self.length] = block
        self.length += 1

    def replace(self, index: int, block: int) -> int:
        """Puts `block` at `index`; returns what was there."""
        old = int(self._ids[index])
        self._ids[index] = block
        return old

    def drop_first(self) -> int:
        """Lets the earliest live block go; returns it."""
        block = self.replace(self.first, -1)
        self.first += 1
        return block

    def live(self) -> list[int]:
        """The block ids still held, earliest first."""
        blocks: list[int] = self._ids[self.first : self.length].tolist()
        return blocks
