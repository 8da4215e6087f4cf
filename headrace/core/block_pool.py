"""BlockPool: the KV blocks of one group, who holds them, and which hold a known prefix.

A block is in exactly one of three places:

    held       ref_cnt > 0; perhaps also in the prefix index
    evictable  ref_cnt = 0 and in the prefix index; ordered by last use
    blank      ref_cnt = 0 and nothing worth keeping

`allocate` takes blank blocks first, then evicts the least recently used. Both free sets are ordered dictionaries: a hit
takes a block out of the middle, which a deque cannot do in O(1). Every operation is O(1).

The pool knows hashes only as opaque bytes, no tokens, no requests and no tensors. It is told about content; it never
looks. `generation` counts how often a block was handed out, so that a note about a block can be recognised as stale.
"""

from collections import OrderedDict
from collections.abc import Sequence

from headrace.base.errors import HeadraceError


class BlockPoolError(HeadraceError):
    """A block was used against the rules (freed twice, taken from an empty pool, ...), or the pool's books disagree."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_cnt = [0] * num_blocks
        self.generation = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(range(num_blocks)))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out, cached ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._index)

    def allocate(self) -> int:
        """A block with ref_cnt 1 and no content. Raises BlockPoolError when none is free."""
        if self._blank:
            block, _ = self._blank.popitem()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        else:
            raise BlockPoolError(f"all {self.num_blocks} KV blocks are held")
        self.ref_cnt[block] = 1
        self.generation[block] += 1
        return block

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix, or None. Takes no reference."""
        return self._index.get(block_hash)

    def touch(self, block: int) -> None:
        """One more holder, of a block that is held or in the prefix index."""
        if self.ref_cnt[block] == 0:
            if self._hash[block] is None:
                raise BlockPoolError(f"KV block {block} is free and holds nothing: it cannot be shared")
            del self._evictable[block]
        self.ref_cnt[block] += 1

    def release(self, block: int) -> None:
        """One holder less. A block that nobody holds becomes evictable if cached, else blank (the next to be taken)."""
        if self.ref_cnt[block] <= 0:
            raise BlockPoolError(f"KV block {block} is freed twice")
        self.ref_cnt[block] -= 1
        if self.ref_cnt[block] > 0:
            return
        if self._hash[block] is None:
            self._blank[block] = None
        else:
            self._evictable[block] = None

    def defer_reuse(self, block: int) -> None:
        """Makes a blank block the last blank one to be taken: its content may yet be worth caching."""
        if block in self._blank:
            self._blank.move_to_end(block, last=False)

    def is_cached(self, block: int) -> bool:
        return self._hash[block] is not None

    def cache(self, block: int, block_hash: bytes) -> bool:
        """Names the content of a block. False, and no change, where it or another block already has this name."""
        if self._hash[block] is not None or block_hash in self._index:
            return False
        self._hash[block] = block_hash
        self._index[block_hash] = block
        if self.ref_cnt[block] == 0:
            del self._blank[block]
            self._evictable[block] = None
        return True

    def uncache(self, block: int) -> None:
        """Takes the name away, because the block is about to be written."""
        if self._hash[block] is None:
            return
        self._forget(block)
        if self.ref_cnt[block] == 0:
            del self._evictable[block]
            self._blank[block] = None

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        if block_hash is not None:
            del self._index[block_hash]
            self._hash[block] = None

    def check_integrity(self, holders: Sequence[int] | None = None) -> None:
        """Linear check of all books; `holders` counts the tables that hold each block. Raises BlockPoolError."""
        for block in range(self.num_blocks):
            held, cached = self.ref_cnt[block] > 0, self._hash[block] is not None
            if self.ref_cnt[block] < 0:
                raise BlockPoolError(f"KV block {block} has ref_cnt {self.ref_cnt[block]}")
            if (block in self._blank) != (not held and not cached):
                raise BlockPoolError(f"KV block {block} is wrongly {'' if block in self._blank else 'not '}blank")
            if (block in self._evictable) != (not held and cached):
                raise BlockPoolError(
                    f"KV block {block} is wrongly {'' if block in self._evictable else 'not '}evictable"
                )
            if holders is not None and holders[block] != self.ref_cnt[block]:
                raise BlockPoolError(f"KV block {block} has ref_cnt {self.ref_cnt[block]} and {holders[block]} holders")
        for block_hash, block in self._index.items():
            if self._hash[block] != block_hash:
                raise BlockPoolError(f"the prefix index names KV block {block} by a hash that the block does not have")
        if len(self._index) != sum(block_hash is not None for block_hash in self._hash):
            raise BlockPoolError("the prefix index and the hashes of KV blocks differ in number")
