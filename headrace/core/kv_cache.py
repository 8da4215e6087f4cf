"""KVCacheManager: which blocks each request holds in each KV group, and what of a prompt is already computed.

It knows requests, tokens and blocks; it knows no queues, no budget and no tensors. Rules it keeps:

- Blocks are taken on demand, never for `max_tokens`. `fit` says how far a request can go; `allocate` takes it there.
- A block held by more than one request is never written: the writer gets a copy (`Batch.block_copies`).
- A full block enters the prefix index only by `commit`, after its numbers are known to be finite.
- Windowed groups let go of what no later query can see; a prefix hit needs only the window's blocks there.
- A block freed while a submitted step may use it can be taken again only after that step has ended.

A prefix is named by chained SHA-256: hash(parent's hash + the block's tokens), from a root that holds the tenant's
`cache_salt`, the adapter and the cache's dtype. Equal names mean equal prefixes; two salts never share. There is no
tree: a chained hash finds the longest prefix with one lookup a block, and eviction needs no walk.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.core.block_pool import BlockPool, BlockPoolError
from headrace.core.block_table import BlockTable
from headrace.core.kv_group import KVDtype, KVGroup
from headrace.core.request import Request

Key = tuple[str, int]
BlockCopy = tuple[int, int, int]  # group, source, destination


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """KV that a request can take over: `num_tokens` tokens in `blocks[group]`, -1 where the window has left.

    From the prefix index the last block is full; from a fork it may be partial.
    """

    num_tokens: int
    blocks: tuple[list[int], ...]


@dataclass(slots=True)
class _Holding:
    """What one admitted request holds."""

    tables: list[BlockTable]
    num_committed: int  # leading blocks whose names are given to the prefix index
    left: list[tuple[int, int, int, int]] = field(default_factory=list)  # group, index, block, generation: see `commit`
    # Positions from num_computed_tokens up to here lie in blocks that nobody shares and that have no name, and no
    # window slides before: they can be written at once. A hint; 0 is always right.
    open_until: int = 0
    views: tuple[npt.NDArray[np.int32], ...] | None = None  # of the tables; None after each change


class KVCacheManager:
    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        enable_prefix_caching: bool = True,
        dtype: KVDtype = "bf16",
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.dtype = dtype
        self.pools = [BlockPool(count) for count in num_blocks]
        self._holdings: dict[Key, _Holding] = {}
        self._hashes: dict[Key, list[bytes]] = {}
        self._submitted = -1  # the last step that was submitted, and the last that ended
        self._ended = -1
        self._deferred: list[tuple[int, int, int]] = []  # step, group, block: released when the step ends

    # Sizes

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return min(
            (1 << 62) if self._span(group) <= pool.num_blocks and group.window else pool.num_blocks * self.block_size
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def _span(self, group: KVGroup) -> int:
        """Blocks that one query of a windowed group can see, however it lies."""
        return -(-(group.window - 1) // self.block_size) + 1

    def _peak(self, group: KVGroup, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` needs at once, going token by token."""
        whole = -(-num_tokens // self.block_size)
        return min(whole, self._span(group)) if group.window else whole

    def _first_visible(self, group: KVGroup, position: int) -> int:
        """Index of the first block that a query at `position` or later can see."""
        return max(0, position - group.window + 1) // self.block_size if group.window else 0

    # Prefixes

    def match_prefix(self, request: Request, limit: int) -> PrefixMatch:
        """The longest cached prefix of at most `limit` tokens. Pass less than all tokens: one must be computed.

        Changes nothing but the memo of hashes. A match is valid until the next change of the manager.
        """
        if not self.enable_prefix_caching or limit < self.block_size:
            return PrefixMatch(0, tuple([] for _ in self.groups))
        hashes = self._block_hashes(request, limit // self.block_size)
        found = [
            [pool.lookup(name) for name in hashes] if group.window else self._leading(pool, hashes)
            for group, pool in zip(self.groups, self.pools, strict=True)
        ]
        longest = min(len(blocks) for blocks in found)
        runs = {g: _run_lengths(found[g]) for g, group in enumerate(self.groups) if group.window}
        length = next(n for n in range(longest, -1, -1) if self._window_present(runs, n))
        firsts = [self._first_visible(group, length * self.block_size) for group in self.groups]
        blocks = tuple(
            [-1] * first + [block for block in row[first:length] if block is not None]
            for first, row in zip(firsts, found, strict=True)
        )
        return PrefixMatch(length * self.block_size, blocks)

    def match_fork(self, parent: Request, num_tokens: int) -> PrefixMatch | None:
        """The first `num_tokens` tokens of a running request, shared; None where a window has already left them."""
        holding = self._holdings.get(parent.key)
        if holding is None or parent.num_computed_tokens < num_tokens:
            return None
        num_blocks = -(-num_tokens // self.block_size)
        blocks = []
        for group, table in zip(self.groups, holding.tables, strict=True):
            first = self._first_visible(group, num_tokens)
            if table.first > first:
                return None
            blocks.append([-1] * first + table.view[first:num_blocks].tolist())
        return PrefixMatch(num_tokens, tuple(blocks))

    def _leading(self, pool: BlockPool, hashes: list[bytes]) -> list[int | None]:
        blocks: list[int | None] = []
        for name in hashes:
            block = pool.lookup(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _window_present(self, runs: dict[int, list[int]], length: int) -> bool:
        return all(
            length == 0 or run[length - 1] >= length - self._first_visible(self.groups[g], length * self.block_size)
            for g, run in runs.items()
        )

    def _block_hashes(self, request: Request, count: int) -> list[bytes]:
        """Names of the first `count` blocks, all full of known tokens."""
        hashes = self._hashes.setdefault(request.key, [])
        parent = hashes[-1] if hashes else _root_hash(request, self.dtype)
        for index in range(len(hashes), count):
            tokens = request.token_range(index * self.block_size, (index + 1) * self.block_size)
            parent = hashlib.sha256(parent + array("i", tokens).tobytes()).digest()
            hashes.append(parent)
        return hashes[:count]

    # Holding blocks

    def reserve(self, running: Iterable[Request]) -> list[int]:
        """Blocks per group that running requests still need for the tokens they know, and one each to grow into."""
        reserved = [0] * len(self.groups)
        for request in running:
            for g, table in enumerate(self._holdings[request.key].tables):
                reserved[g] += max(0, self._peak(self.groups[g], request.num_tokens) - table.num_live) + 1
        return reserved

    def can_admit(self, match: PrefixMatch, num_tokens: int, reserved: Sequence[int]) -> bool:
        """Whether a new request of `num_tokens` known tokens finds its blocks and leaves `reserved` ones."""
        full = match.num_tokens // self.block_size
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            shared = sum(block >= 0 and pool.ref_cnt[block] > 0 for block in match.blocks[g][:full])
            if self._peak(group, num_tokens) - shared + reserved[g] > pool.num_free:
                return False
        return True

    def admit(self, request: Request, match: PrefixMatch) -> None:
        """Starts holding blocks for a request, beginning with what `match` found."""
        if request.key in self._holdings:
            raise BlockPoolError(f"request {request.key} already holds KV blocks")
        if match.num_tokens % self.block_size:  # the last block is another's too, who must copy it before it writes on
            for holding in self._holdings.values():
                holding.open_until = 0
        tables = []
        for g, blocks in enumerate(match.blocks):
            for block in blocks:
                if block >= 0:
                    self.pools[g].touch(block)
            first = next((i for i, block in enumerate(blocks) if block >= 0), len(blocks))
            tables.append(BlockTable(blocks, first))
        self._holdings[request.key] = _Holding(tables, match.num_tokens // self.block_size)

    def fit(self, request: Request, want: int) -> int:
        """How many of the next `want` tokens have or could get blocks now. Lets go of what left the window."""
        holding = self._holdings[request.key]
        start = request.num_computed_tokens
        if start + want <= holding.open_until:
            return want
        self._slide(holding, start)
        for table, pool in zip(holding.tables, self.pools, strict=True):
            copies = self._is_shared(pool, table, start)
            room = pool.num_free - copies
            if room < 0:
                return 0
            want = min(want, (len(table) + room) * self.block_size - start)
        return want

    def allocate(self, request: Request, num_new: int) -> list[BlockCopy]:
        """Takes blocks for the next `num_new` tokens, which `fit` allowed. Returns the copies due before the write."""
        holding = self._holdings[request.key]
        start = request.num_computed_tokens
        copies: list[BlockCopy] = []
        if start + num_new <= holding.open_until:
            return copies
        holding.views = None
        for g, (table, pool) in enumerate(zip(holding.tables, self.pools, strict=True)):
            index = start // self.block_size
            if self._is_shared(pool, table, start):
                destination = pool.allocate()
                source = table.replace(index, destination)
                copies.append((g, source, destination))
                self._release(g, source)
            elif index < len(table):
                pool.uncache(table[index])
            while len(table) * self.block_size < start + num_new:
                table.append(pool.allocate())
        holding.open_until = min(map(self._open_until, self.groups, holding.tables))
        return copies

    def _open_until(self, group: KVGroup, table: BlockTable) -> int:
        """Where the blocks of a table end or, if that is earlier, one past the last position that keeps them all."""
        end = len(table) * self.block_size
        return min(end, (table.first + 1) * self.block_size + group.window - 1) if group.window else end

    def _is_shared(self, pool: BlockPool, table: BlockTable, position: int) -> bool:
        """Whether writing `position` would write into a block that another request holds too."""
        index = position // self.block_size
        return index < len(table) and pool.ref_cnt[table[index]] > 1

    def _slide(self, holding: _Holding, position: int) -> None:
        for g, (group, table) in enumerate(zip(self.groups, holding.tables, strict=True)):
            for index in range(table.first, min(self._first_visible(group, position), len(table))):
                block = table.drop_first()
                holding.views = None
                if self.enable_prefix_caching and index >= holding.num_committed:
                    holding.left.append((g, index, block, self.pools[g].generation[block]))
                self._release(g, block)
                self.pools[g].defer_reuse(block)

    def commit(self, request: Request) -> None:
        """Names all full blocks up to `num_computed_tokens`: the caller has seen a finite row computed from them.

        Blocks that left a window before are named too, unless they were taken again meanwhile.
        """
        holding = self._holdings[request.key]
        count = request.num_computed_tokens // self.block_size
        if count <= holding.num_committed or not self.enable_prefix_caching:
            return
        hashes = self._block_hashes(request, count)
        for g, index, block, generation in holding.left:
            if self.pools[g].generation[block] == generation:
                self.pools[g].cache(block, hashes[index])
        holding.left.clear()
        for pool, table in zip(self.pools, holding.tables, strict=True):
            for index in range(max(holding.num_committed, table.first), count):
                pool.cache(table[index], hashes[index])
        holding.num_committed = count

    def free(self, request: Request) -> None:
        """Lets everything of a request go, if it holds anything. Its deepest blocks will be evicted first."""
        self._hashes.pop(request.key, None)
        holding = self._holdings.pop(request.key, None)
        if holding is None:
            return
        for g, table in enumerate(holding.tables):
            for block in reversed(table.live()):
                self._release(g, block)

    def block_tables(self, request: Request) -> tuple[npt.NDArray[np.int32], ...]:
        """Views of the request's tables, one per group; valid until the next change, and the same object until then."""
        holding = self._holdings[request.key]
        if holding.views is None:
            holding.views = tuple(table.view for table in holding.tables)
        return holding.views

    # Steps

    def begin_step(self, step_id: int) -> None:
        """The step was handed to the backend: until it ends, freed blocks stay untouched."""
        self._submitted = step_id

    def end_step(self, step_id: int) -> None:
        self._ended = step_id
        due = [entry for entry in self._deferred if entry[0] <= step_id]
        self._deferred = [entry for entry in self._deferred if entry[0] > step_id]
        for _, g, block in due:
            self.pools[g].release(block)

    def _release(self, g: int, block: int) -> None:
        if self._submitted > self._ended:
            self._deferred.append((self._submitted, g, block))
        else:
            self.pools[g].release(block)

    def check_integrity(self) -> None:
        """Linear check that pools and tables agree. Raises BlockPoolError."""
        for g, pool in enumerate(self.pools):
            holders = [0] * pool.num_blocks
            for holding in self._holdings.values():
                for block in holding.tables[g].live():
                    holders[block] += 1
            for _, group, block in self._deferred:
                if group == g:
                    holders[block] += 1
            pool.check_integrity(holders)


def _root_hash(request: Request, dtype: KVDtype) -> bytes:
    salt = request.cache_salt.encode()
    return hashlib.sha256(b"%s:%d:%d:" % (dtype.encode(), request.adapter_id, len(salt)) + salt).digest()


def _run_lengths(blocks: list[int | None]) -> list[int]:
    """For each index, how many blocks up to and with it are present without a gap."""
    runs: list[int] = []
    for block in blocks:
        runs.append(0 if block is None else (runs[-1] if runs else 0) + 1)
    return runs
