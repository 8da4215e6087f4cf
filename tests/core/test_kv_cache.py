"""KVCacheManager against a naive model: what stands in each slot is a prefix of tokens, and nothing is shared."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from headrace.core.block_pool import BlockPoolError
from headrace.core.kv_cache import KVCacheManager
from headrace.core.kv_group import KVGroup
from headrace.core.request import Request, SamplingParams

FULL = KVGroup("full", (0,), 1, 8)
BLOCK = 4


def window(size: int) -> KVGroup:
    return KVGroup("window", (1,), 1, 8, size)


def request(name: str, tokens: list[int], salt: str = "", adapter: int = 0) -> Request:
    return Request(name, tokens, SamplingParams(), 0, cache_salt=salt, adapter_id=adapter)


def compute(kv: KVCacheManager, r: Request, count: int | None = None) -> None:
    """Admits if need be, then computes `count` tokens (all) as a scheduler would."""
    if r.key not in kv._holdings:
        match = kv.match_prefix(r, r.num_tokens - 1)
        kv.admit(r, match)
        r.num_computed_tokens = match.num_tokens
    want = r.num_tokens - r.num_computed_tokens if count is None else count
    assert kv.fit(r, want) == want
    kv.allocate(r, want)
    r.num_computed_tokens += want
    kv.commit(r)
    kv.check_integrity()


class KVMachine(RuleBasedStateMachine):
    """Requests come, grow, fork and go in two groups; `content` is what a backend would have in its slots."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.groups = (FULL, window(6))
        self.kv = KVCacheManager(self.groups, (12, 9), BLOCK)
        self.content: list[dict[int, tuple[int, ...]]] = [{}, {}]
        self.live: list[Request] = []
        self.count = 0

    def start(self, tokens: list[int], salt: str) -> Request:
        self.count += 1
        return request(f"r{self.count}", tokens, salt)

    def grow(self, r: Request, want: int) -> None:
        """Computes up to `want` tokens, as far as blocks last; writes what the backend would write."""
        granted = self.kv.fit(r, want)
        if granted == 0:
            return
        for g, source, destination in self.kv.allocate(r, granted):
            for offset in range(BLOCK):
                old = self.content[g].get(source * BLOCK + offset)
                self.content[g][destination * BLOCK + offset] = old  # type: ignore[assignment]
        tokens = r.token_range(0, r.num_tokens)
        for position in range(r.num_computed_tokens, r.num_computed_tokens + granted):
            for g, table in enumerate(self.kv.block_tables(r)):
                slot = int(table[position // BLOCK]) * BLOCK + position % BLOCK
                self.content[g][slot] = tuple(tokens[: position + 1])
        r.num_computed_tokens += granted

    @rule(target=requests, seed=st.integers(0, 2), length=st.integers(1, 20), salt=st.sampled_from(["", "t"]))
    def admit(self, seed: int, length: int, salt: str) -> Request:
        r = self.start([(seed + i) % 7 for i in range(length)], salt)
        match = self.kv.match_prefix(r, r.num_tokens - 1)
        assert match.num_tokens < r.num_tokens
        if self.kv.can_admit(match, r.num_tokens, self.kv.reserve(self.live)):
            self.kv.admit(r, match)
            r.num_computed_tokens = match.num_tokens
            self.live.append(r)
            self.grow(r, r.num_tokens - r.num_computed_tokens)
            assert r.num_computed_tokens > match.num_tokens, "admitted and nothing fits"
        return r

    @rule(r=requests, token=st.integers(0, 3), commits=st.booleans())
    def extend(self, r: Request, token: int, commits: bool) -> None:
        if r in self.live:
            if r.num_computed_tokens == r.num_tokens:
                r.output_token_ids.append(token)
            self.grow(r, r.num_tokens - r.num_computed_tokens)
            if commits:
                self.kv.commit(r)

    @rule(target=requests, parent=requests)
    def fork(self, parent: Request) -> Request:
        child = self.start(list(parent.prompt_token_ids), parent.cache_salt)
        match = self.kv.match_fork(parent, parent.num_prompt_tokens - 1)
        if match is not None and self.kv.can_admit(match, child.num_tokens, self.kv.reserve(self.live)):
            self.kv.admit(child, match)
            child.num_computed_tokens = match.num_tokens
            self.live.append(child)
            self.grow(child, 1)
            assert child.num_computed_tokens == child.num_tokens
        return child

    @rule(r=consumes(requests))
    def finish(self, r: Request) -> None:
        self.kv.free(r)
        if r in self.live:
            self.live.remove(r)

    @invariant()
    def every_request_reads_its_own_prefix(self) -> None:
        self.kv.check_integrity()
        for r in self.live:
            tokens = r.token_range(0, r.num_tokens)
            for g, table in enumerate(self.kv.block_tables(r)):
                size = self.groups[g].window
                first = max(0, r.num_computed_tokens - size + 1) if size else 0
                for position in range(first, r.num_computed_tokens):
                    block = int(table[position // BLOCK])
                    assert block >= 0, "a visible block was let go"
                    assert self.content[g][block * BLOCK + position % BLOCK] == tuple(tokens[: position + 1])

    @invariant()
    def nothing_is_held_by_nobody(self) -> None:
        if not self.live:
            assert self.kv.num_used_blocks == 0


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9, 12])
def test_the_last_token_is_never_taken_from_the_cache(length: int) -> None:
    kv = KVCacheManager((FULL,), (16,), BLOCK)
    tokens = list(range(length))
    compute(kv, request("a", tokens))
    match = kv.match_prefix(request("b", tokens), length - 1)
    assert match.num_tokens == (length - 1) // BLOCK * BLOCK


def test_a_prefix_hit_shares_blocks_and_outlives_its_first_holder() -> None:
    kv = KVCacheManager((FULL,), (16,), BLOCK)
    first = request("a", list(range(10)))
    compute(kv, first)
    held = kv.block_tables(first)[0].tolist()
    kv.free(first)
    second = request("b", [*range(8), 50, 51])
    compute(kv, second)
    assert kv.block_tables(second)[0].tolist()[:2] == held[:2]


@pytest.mark.parametrize(
    "other",
    [request("b", list(range(9)), salt="t"), request("b", list(range(9)), adapter=1), request("b", [*range(1, 10)])],
)
def test_another_salt_adapter_or_first_token_shares_nothing(other: Request) -> None:
    kv = KVCacheManager((FULL,), (16,), BLOCK)
    compute(kv, request("a", list(range(9))))
    assert kv.match_prefix(other, 8).num_tokens == 0


def test_caches_of_two_dtypes_name_the_same_prefix_differently() -> None:
    """What one kept could be offered to the other: through a file, or another process."""
    names = []
    for dtype in ("bf16", "int8"):
        kv = KVCacheManager((FULL,), (16,), BLOCK, dtype=dtype)  # type: ignore[arg-type]
        names.append(kv._block_hashes(request("a", list(range(9))), 2))
    assert not set(names[0]) & set(names[1])


def test_a_salt_cannot_imitate_an_adapter() -> None:
    """The root hash writes lengths, so that no salt continues into another field."""
    kv = KVCacheManager((FULL,), (16,), BLOCK)
    compute(kv, request("a", list(range(9)), salt="0:0:", adapter=0))
    assert kv.match_prefix(request("b", list(range(9)), salt="0:", adapter=0), 8).num_tokens == 0


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVCacheManager((FULL,), (16,), BLOCK, enable_prefix_caching=False)
    compute(kv, request("a", list(range(9))))
    assert kv.match_prefix(request("b", list(range(9))), 8).num_tokens == 0
    assert kv.pools[0].num_cached == 0


def test_what_is_not_committed_is_never_found() -> None:
    """Numbers that turned out not finite: the request is freed without a commit."""
    kv = KVCacheManager((FULL,), (16,), BLOCK)
    r = request("a", list(range(9)))
    kv.admit(r, kv.match_prefix(r, 8))
    kv.allocate(r, kv.fit(r, 9))
    r.num_computed_tokens = 9
    kv.free(r)
    assert kv.match_prefix(request("b", list(range(9))), 8).num_tokens == 0


def test_the_deepest_blocks_of_a_freed_request_are_evicted_first() -> None:
    kv = KVCacheManager((FULL,), (4,), BLOCK)
    r = request("a", list(range(16)))
    compute(kv, r)
    kv.free(r)
    compute(kv, request("b", list(range(100, 108))))
    assert kv.match_prefix(request("c", list(range(16))), 15).num_tokens == 8


def test_a_windowed_group_holds_only_what_its_window_can_see() -> None:
    kv = KVCacheManager((FULL, window(6)), (32, 32), BLOCK)
    r = request("a", list(range(40)))
    while r.num_computed_tokens < 40:
        compute(kv, r, 1)
    kv.fit(r, 1)
    full, windowed = kv.block_tables(r)
    assert (full >= 0).all()
    assert windowed.tolist()[:8] == [-1] * 8  # the query at 40 sees [35, 40]
    assert (windowed[8:] >= 0).all()
    assert kv.pools[1].num_used == 2


def test_a_prefix_hit_needs_only_the_window_in_a_windowed_group() -> None:
    kv = KVCacheManager((FULL, window(6)), (32, 32), BLOCK)
    first = request("a", list(range(40)))
    while first.num_computed_tokens < 40:
        compute(kv, first, 1)
    kv.free(first)
    kv.pools[1].uncache(kv.pools[1].lookup(kv._block_hashes(request("x", list(range(40))), 10)[2]))  # type: ignore[arg-type]
    match = kv.match_prefix(request("b", [*range(40), 7]), 40)
    assert match.num_tokens == 40
    assert match.blocks[1][:8] == [-1] * 8
    assert min(match.blocks[1][8:]) >= 0


def test_a_prefix_hit_shrinks_to_where_the_window_is_whole() -> None:
    """Blocks 8 and 9 of the windowed group are gone: the longest usable prefix ends before them."""
    kv = KVCacheManager((FULL, window(6)), (32, 32), BLOCK)
    first = request("a", list(range(40)))
    compute(kv, first)
    for block in kv.block_tables(first)[1].tolist()[8:]:
        kv.pools[1].uncache(block)
    assert kv.match_prefix(request("b", list(range(41))), 40).num_tokens == 32


def test_blocks_that_left_the_window_before_the_commit_are_still_found() -> None:
    """A long prompt goes in chunks with no output row, so nothing is committed until its end."""
    kv = KVCacheManager((FULL, window(6)), (32, 32), BLOCK)
    r = request("a", list(range(32)))
    kv.admit(r, kv.match_prefix(r, 31))
    for _ in range(4):
        kv.allocate(r, kv.fit(r, 8))
        r.num_computed_tokens += 8
    kv.commit(r)
    assert kv.match_prefix(request("b", [*range(16), 99, 98]), 17).num_tokens == 16


def test_a_block_that_left_the_window_and_was_taken_again_is_not_named() -> None:
    kv = KVCacheManager((FULL, window(2)), (32, 5), BLOCK)
    r = request("a", list(range(32)))
    kv.admit(r, kv.match_prefix(r, 31))
    for _ in range(8):
        kv.allocate(r, kv.fit(r, 4))
        r.num_computed_tokens += 4
    kv.commit(r)
    hashes = kv._block_hashes(r, 8)
    assert kv.pools[1].lookup(hashes[0]) is None
    kv.check_integrity()


def test_a_fork_shares_blocks_and_copies_only_the_partial_one() -> None:
    kv = KVCacheManager((FULL,), (16,), BLOCK)
    parent, child = request("a", list(range(10))), request("a", list(range(10)))
    child.choice = 1
    compute(kv, parent)
    match = kv.match_fork(parent, 9)
    assert match is not None
    kv.admit(child, match)
    child.num_computed_tokens = 9
    assert kv.pools[0].num_used == 3
    source = int(kv.block_tables(parent)[0][2])
    copies = kv.allocate(child, kv.fit(child, 1))
    assert copies == [(0, source, int(kv.block_tables(child)[0][2]))]
    assert kv.allocate(parent, kv.fit(parent, 1)) == []  # it is the only holder now
    kv.check_integrity()


def test_a_block_that_was_open_to_its_only_holder_is_copied_once_a_fork_shares_it() -> None:
    kv = KVCacheManager((FULL,), (16,), BLOCK)
    parent, child = request("a", list(range(9))), request("a", list(range(9)))
    child.choice = 1
    compute(kv, parent)
    parent.output_token_ids.append(9)
    compute(kv, parent)  # inside its open block
    match = kv.match_fork(parent, 10)
    assert match is not None
    kv.admit(child, match)
    shared = int(kv.block_tables(parent)[0][2])
    parent.output_token_ids.append(10)
    copies = kv.allocate(parent, kv.fit(parent, 1))
    assert copies == [(0, shared, int(kv.block_tables(parent)[0][2]))]
    assert kv.block_tables(child)[0][2] == shared
    kv.check_integrity()


def test_tables_are_one_object_until_they_change() -> None:
    kv = KVCacheManager((FULL, window(6)), (16, 16), BLOCK)
    r = request("a", list(range(5)))
    compute(kv, r)
    seen = kv.block_tables(r)
    content = [table.tolist() for table in seen]
    for token in range(12):
        r.output_token_ids.append(token)
        compute(kv, r)
        now = kv.block_tables(r)
        assert (now is seen) == ([table.tolist() for table in now] == content)
        seen, content = now, [table.tolist() for table in now]


def test_the_last_holder_of_a_cached_block_writes_it_without_a_copy_and_takes_its_name_away() -> None:
    kv = KVCacheManager((FULL,), (16,), BLOCK)
    parent, child = request("a", list(range(8))), request("a", list(range(8)))
    child.choice = 1
    compute(kv, parent)
    match = kv.match_fork(parent, 7)
    assert match is not None
    kv.admit(child, match)
    child.num_computed_tokens = 7
    kv.free(parent)
    block = int(kv.block_tables(child)[0][1])
    assert kv.pools[0].is_cached(block)
    assert kv.allocate(child, kv.fit(child, 1)) == []
    assert not kv.pools[0].is_cached(block)


def test_a_fork_is_refused_where_the_window_has_gone_by() -> None:
    kv = KVCacheManager((window(4),), (16,), BLOCK)
    parent = request("a", list(range(9)))
    compute(kv, parent)
    assert kv.match_fork(parent, 8) is not None
    parent.output_token_ids.extend(range(12))
    compute(kv, parent)
    kv.fit(parent, 1)
    assert kv.match_fork(parent, 8) is None


def test_blocks_freed_during_a_step_come_back_when_it_ends() -> None:
    kv = KVCacheManager((FULL,), (4,), BLOCK)
    r = request("a", list(range(9)))
    compute(kv, r)
    kv.begin_step(0)
    kv.free(r)
    assert kv.pools[0].num_free == 1
    kv.check_integrity()
    kv.begin_step(1)
    kv.end_step(0)
    assert kv.pools[0].num_free == 4
    kv.end_step(1)
    kv.check_integrity()


def test_fit_says_how_far_the_blocks_last() -> None:
    kv = KVCacheManager((FULL,), (3,), BLOCK)
    r = request("a", list(range(20)))
    kv.admit(r, kv.match_prefix(r, 19))
    assert kv.fit(r, 20) == 12
    assert kv.fit(r, 5) == 5


@pytest.mark.parametrize(
    ("groups", "blocks", "capacity"),
    [
        ((FULL,), (3,), 12),
        ((FULL, window(6)), (10, 3), 40),
        ((FULL, window(6)), (10, 2), 8),  # two blocks cannot hold every six-token window
        ((FULL, window(5)), (10, 2), 40),
    ],
)
def test_capacity_is_the_longest_lone_sequence(
    groups: tuple[KVGroup, ...], blocks: tuple[int, ...], capacity: int
) -> None:
    kv = KVCacheManager(groups, blocks, BLOCK)
    assert kv.capacity_tokens == capacity
    r = request("a", list(range(capacity)))
    kv.admit(r, kv.match_prefix(r, capacity - 1))
    while r.num_computed_tokens < capacity:
        granted = kv.fit(r, capacity)
        assert granted > 0
        granted = min(granted, capacity - r.num_computed_tokens)
        kv.allocate(r, granted)
        r.num_computed_tokens += granted
    kv.free(r)
    assert kv.num_used_blocks == 0


def test_admitting_twice_is_refused_and_freeing_a_stranger_does_nothing() -> None:
    kv = KVCacheManager((FULL,), (4,), BLOCK)
    r = request("a", [1, 2, 3])
    kv.admit(r, kv.match_prefix(r, 2))
    with pytest.raises(BlockPoolError, match="already holds"):
        kv.admit(r, kv.match_prefix(r, 2))
    kv.free(request("stranger", [1]))
    kv.check_integrity()
