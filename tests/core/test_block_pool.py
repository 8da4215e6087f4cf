"""BlockPool as a state machine against a naive model: lists, no sharing of code, no cleverness."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.block_pool import BlockPool, BlockPoolError

NUM_BLOCKS = 5


class PoolMachine(RuleBasedStateMachine):
    """The model keeps a holder list per block, names per block, and the order in which cached blocks became free."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders = [0] * NUM_BLOCKS
        self.names: dict[int, bytes] = {}
        self.idle_cached: list[int] = []

    def free(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if self.holders[block] == 0]

    def held(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if self.holders[block]]

    @precondition(lambda self: self.free())
    @rule()
    def allocate(self) -> None:
        blank = [block for block in self.free() if block not in self.names]
        block = self.pool.allocate()
        if blank:
            assert block in blank, "a cached block was taken while a blank one was free"
        else:
            assert block == self.idle_cached.pop(0), "not the least recently used block was evicted"
            del self.names[block]
        self.holders[block] = 1

    @precondition(lambda self: not self.free())
    @rule()
    def allocate_from_an_empty_pool(self) -> None:
        with pytest.raises(BlockPoolError, match="all 5 KV blocks are held"):
            self.pool.allocate()

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held()))
        self.pool.release(block)
        self.holders[block] -= 1
        if self.holders[block] == 0 and block in self.names:
            self.idle_cached.append(block)

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def release_twice(self, data: st.DataObject) -> None:
        with pytest.raises(BlockPoolError, match="freed twice"):
            self.pool.release(data.draw(st.sampled_from(self.free())))

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def hit(self, name: bytes) -> None:
        """A request takes over a cached block."""
        block = self.pool.lookup(name)
        assert block == next((b for b, known in self.names.items() if known == name), None)
        if block is not None:
            self.pool.touch(block)
            self.holders[block] += 1
            if block in self.idle_cached:
                self.idle_cached.remove(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def touch_blank(self, block: int) -> None:
        if self.holders[block] == 0 and block not in self.names:
            with pytest.raises(BlockPoolError, match="cannot be shared"):
                self.pool.touch(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1), name=st.sampled_from([b"a", b"b", b"c"]))
    def cache(self, block: int, name: bytes) -> None:
        fits = block not in self.names and name not in self.names.values()
        assert self.pool.cache(block, name) == fits
        if fits:
            self.names[block] = name
            if self.holders[block] == 0:
                self.idle_cached.append(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def uncache(self, block: int) -> None:
        self.pool.uncache(block)
        self.names.pop(block, None)
        if block in self.idle_cached:
            self.idle_cached.remove(block)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity(self.holders)
        assert self.pool.num_free == len(self.free())
        assert self.pool.num_used + self.pool.num_free == NUM_BLOCKS
        assert self.pool.num_cached == len(self.names)
        assert self.pool.ref_cnt == self.holders
        assert all(self.pool.is_cached(block) == (block in self.names) for block in range(NUM_BLOCKS))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blank_blocks_whose_content_may_matter_are_taken_last() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.release(first)
    pool.defer_reuse(first)
    pool.release(second)
    assert [pool.allocate() for _ in range(3)][-1] == first


def test_generation_tells_that_a_block_was_handed_out_again() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    before = pool.generation[block]
    pool.release(block)
    assert pool.generation[block] == before
    pool.allocate()
    assert pool.generation[block] == before + 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool.ref_cnt.__setitem__(0, -1), "ref_cnt -1"),
        (lambda pool: pool._blank.clear(), "wrongly not blank"),
        (lambda pool: pool._evictable.update({1: None}), "wrongly evictable"),
        (lambda pool: pool._index.update({b"x": 0}), "does not have"),
        (lambda pool: pool._hash.__setitem__(0, b"y"), "differ in number"),
    ],
)
def test_check_integrity_fires(damage, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(2)
    pool.allocate()
    pool.check_integrity([1, 0])
    damage(pool)
    with pytest.raises(BlockPoolError, match=message):
        pool.check_integrity()


def test_check_integrity_counts_holders() -> None:
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(BlockPoolError, match="ref_cnt 1 and 2 holders"):
        pool.check_integrity([2, 0])
