"""How many KV blocks an engine gets and how long its contexts may be, with the reasons, before memory is taken.

    free memory = weights and working space | headroom | share -> KV blocks | rest, for other programs

Full groups get n blocks each, and windowed groups as many as they can ever use, up to n: then they never run out first,
and what they do not need lengthens the contexts. Plain arithmetic on numbers that others measured. Raises
ModelTooLargeError that says what would fit.
"""

from dataclasses import dataclass

from headrace.base.errors import ConfigError, ModelTooLargeError
from headrace.core.kv_group import KVDtype, KVGroup
from headrace.engine.memory import Memory, show_bytes

_KV_SHARE = 0.5  # of what the weights leave: other programs live here too
_MIN_CONTEXT = 256  # a model that cannot hold this many tokens is of no use


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked for; 0 where nothing was."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    block_size: int
    kv_dtype: KVDtype = "bf16"


@dataclass(frozen=True, slots=True)
class Sizes:
    num_blocks: tuple[int, ...]  # per KV group
    max_model_len: int
    kv_bytes: int
    num_kv_tokens: int
    kv_reason: str
    context_reason: str


@dataclass(frozen=True, slots=True)
class _Layout:
    """Blocks and bytes of KV as a function of n, the blocks of a full group."""

    groups: tuple[KVGroup, ...]
    demand: Demand

    def blocks(self, n: int) -> tuple[int, ...]:
        return tuple(min(n, self._most(group)) if group.kind == "window" else n for group in self.groups)

    def bytes(self, n: int) -> int:
        counts = zip(self.groups, self.blocks(n), strict=True)
        demand = self.demand
        return sum(group.bytes_per_token(demand.kv_dtype) * demand.block_size * count for group, count in counts)

    def bytes_for(self, num_tokens: int) -> int:
        return self.bytes(-(-num_tokens // self.demand.block_size))

    def most_within(self, budget: int, limit: int) -> int:
        """The largest n up to `limit` whose bytes fit into `budget`."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= budget else (low, middle - 1)
        return low

    def _most(self, group: KVGroup) -> int:
        """Blocks that all sequences together can use at once: a window and an edge each, and one step's tokens."""
        span = -(-group.window // self.demand.block_size) + 2
        return self.demand.max_num_seqs * span + -(-self.demand.max_num_batched_tokens // self.demand.block_size)


def size_kv(groups: tuple[KVGroup, ...], max_position: int, fixed_bytes: int, memory: Memory, demand: Demand) -> Sizes:
    """`fixed_bytes`: weights as packed and working space. `max_position`: the longest context that the model knows.

    Raises ConfigError for a context that the model does not know, ModelTooLargeError for what does not fit.
    """
    wanted, context_reason = _wanted_context(demand, max_position)
    layout = _Layout(groups, demand)
    headroom = max(64 << 20, memory.available // 20)
    left = memory.available - fixed_bytes - headroom
    least = layout.bytes_for(min(_MIN_CONTEXT, wanted))
    if left < least:
        raise ModelTooLargeError(
            f"the model needs {show_bytes(fixed_bytes)} and its smallest useful KV cache {show_bytes(least)}, but the "
            f"{memory.limited_by} has {show_bytes(memory.available)} free, of which {show_bytes(headroom)} stay free: "
            f"a model that needs at most {show_bytes(max(0, memory.available - headroom - least))} would fit"
        )
    most = demand.max_num_seqs * -(-wanted // demand.block_size)  # every seat with a full context
    budget, kv_reason = _budget(layout, left, least, memory)
    n = layout.most_within(budget, most)
    if n == most and not demand.kv_cache_memory_bytes:
        kv_reason = f"{demand.max_num_seqs} sequences of {wanted} tokens"
    capacity = n * demand.block_size
    if capacity < wanted:
        _check_shorter_is_allowed(layout, wanted, capacity, budget)
        context_reason = f"what the KV cache holds; the model knows {max_position}"
    return Sizes(layout.blocks(n), min(wanted, capacity), layout.bytes(n), capacity, kv_reason, context_reason)


def _wanted_context(demand: Demand, max_position: int) -> tuple[int, str]:
    if demand.max_model_len > max_position:
        raise ConfigError(
            f"--max-model-len {demand.max_model_len} is more than the model knows, which is {max_position} tokens"
        )
    if demand.max_model_len:
        return demand.max_model_len, "--max-model-len"
    return max_position, "what the model knows"


def _budget(layout: _Layout, left: int, least: int, memory: Memory) -> tuple[int, str]:
    """Bytes of KV cache, and why so many."""
    asked = layout.demand.kv_cache_memory_bytes
    if not asked:
        reason = f"{_KV_SHARE:.0%} of what the model leaves free of the {memory.limited_by}'s memory"
        return max(int(left * _KV_SHARE), least), reason
    if asked > left:
        raise ModelTooLargeError(
            f"--kv-cache-memory-bytes {show_bytes(asked)} is more than the {memory.limited_by} has left beside the "
            f"model: at most {show_bytes(left)} would fit"
        )
    if asked < least:
        raise ModelTooLargeError(
            f"--kv-cache-memory-bytes {show_bytes(asked)} is too little: "
            f"{show_bytes(least)} is the least that is useful"
        )
    return asked, "--kv-cache-memory-bytes"


def _check_shorter_is_allowed(layout: _Layout, wanted: int, capacity: int, budget: int) -> None:
    """A context that was asked for is given or refused, never silently shortened."""
    if layout.demand.max_model_len:
        raise ModelTooLargeError(
            f"--max-model-len {wanted} needs {show_bytes(layout.bytes_for(wanted))} of KV cache and there are "
            f"{show_bytes(budget)}: --max-model-len {capacity} would fit, or give it more with --kv-cache-memory-bytes"
        )
