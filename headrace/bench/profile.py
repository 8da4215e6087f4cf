"""Where the time of a step goes: each record of the tape against what the machine can do at most.

    Scenario -> steps through scheduler and backend -> Profile -> lines of a table (and bench/flame.py's picture)

A record's time is the time that workers were in it, divided by the number of workers, so that records, waiting and
Python add up to the step. The limits are measured by the same threads in the same process. Keeping the times costs two
looks at the clock per record and chunk. It knows no HTTP and no server.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from headrace import _C
from headrace.backend.cpu import CpuBackend
from headrace.backend.threads import default_threads
from headrace.base.clock import Clock
from headrace.base.errors import HeadraceError
from headrace.core.batch import Batch
from headrace.core.kv_group import KVGroup
from headrace.core.request import Request, SamplingParams
from headrace.core.scheduler import Scheduler

F64 = npt.NDArray[np.float64]

_WARM_STEPS = 3
_ENDLESS = 1 << 20  # max_tokens of a stream: it is aborted when its scenario is over


@dataclass(frozen=True, slots=True)
class Scenario:
    """`decode`: steps of one token for each of `sequences`, whose contexts begin at `tokens`; else whole prompts."""

    decode: bool
    sequences: int
    tokens: int

    @property
    def name(self) -> str:
        if not self.decode:
            return f"prefill of {self.tokens:,} tokens"
        streams = "1 stream" if self.sequences == 1 else f"{self.sequences} streams"
        return f"decode, {streams} at context {self.tokens:,}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes or operations a second of all threads; 0.0 where the instruction set has no such product."""

    read: float
    int8: float
    bf16: float
    fp32: float


@dataclass(frozen=True, slots=True)
class Row:
    """Equal records of a step, together."""

    label: str
    name: str
    count: int
    ns: float  # of busy workers, divided by the number of workers
    moved: float  # bytes that have to be read: weights, KV, rows
    operations: float
    peak: float  # operations a second that its kind of product can reach; 0.0: unknown

    def of_limit(self, limits: Limits) -> float:
        """The time that the machine's limits leave no way under, as a share of the time taken."""
        floor = max(self.moved / limits.read, self.operations / self.peak if self.peak else 0.0)
        return floor * 1e9 / self.ns if self.ns else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    scenario: Scenario
    rows: list[Row]  # in tape order
    wall_ns: float  # a step from schedule to update
    kernel_ns: float  # of that, inside the pool
    tokens: int  # a step
    line_ns: tuple[float, float] = (0.0, 0.0)  # a line from one core to another, before and after; 0.0: unknown

    @property
    def idle_ns(self) -> float:
        """Inside the pool, but in no record: waiting for work, hand-overs, the clock."""
        return max(0.0, self.kernel_ns - sum(row.ns for row in self.rows))

    @property
    def outside_ns(self) -> float:
        """Scheduling, building the batch, checking it, taking the result."""
        return self.wall_ns - self.kernel_ns


def measure_limits(threads: int, isa: str) -> Limits:
    pool = _C.Pool(threads, spin=threads <= default_threads())
    return Limits(*(_C.measure_peak(pool, isa, kind) for kind in ("read", "int8", "bf16", "fp32")))


class Profiler:
    """Runs scenarios on a scheduler and its backend, which do nothing else meanwhile.

    Raises HeadraceError where the scheduler cannot run a scenario in whole steps.
    """

    def __init__(self, scheduler: Scheduler, backend: CpuBackend, clock: Clock, limits: Limits) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._clock = clock
        self._limits = limits
        self._records = backend.tape.records()
        self._requests = 0

    def run(self, scenario: Scenario, repeats: int) -> Profile:
        """The medians of `repeats` steps, after some that warm up."""
        self._backend.tape.profiling = True
        before = self._line_ns()
        try:
            steps = list(self._steps(scenario, repeats))
        finally:
            self._backend.tape.profiling = False
        busy = np.median([step.record_ns for step in steps], axis=0) / self._backend.threads
        middle = sorted(steps, key=lambda step: step.wall_ns)[len(steps) // 2]
        wall = float(np.median([step.wall_ns for step in steps]))
        kernel = float(np.median([step.kernel_ns for step in steps]))
        rows, lines = self._rows(busy, middle.batch), (before, self._line_ns())
        return Profile(scenario, rows, wall, kernel, middle.batch.num_tokens, lines)

    def _line_ns(self) -> float:
        return _C.measure_line_ns() if self._backend.threads > 1 else 0.0

    def _steps(self, scenario: Scenario, repeats: int) -> Iterator["_Step"]:
        count = 1 if not scenario.decode else repeats + _WARM_STEPS
        rounds = 1 if scenario.decode else repeats + 1
        for round_ in range(rounds):
            names = [self._add(scenario.tokens, _ENDLESS) for _ in range(scenario.sequences)]
            if scenario.decode:
                while self._step().batch.num_rows != scenario.sequences:
                    pass  # prompts
            measured = [self._step() for _ in range(count)]
            wanted = scenario.sequences if scenario.decode else scenario.tokens
            if any(step.batch.num_tokens != wanted for step in measured):
                raise HeadraceError(
                    f"{scenario.name}: does not fit in one step; give it more KV cache or a larger step"
                )
            for name in names:
                self._scheduler.abort(name, self._clock.now_ns())
            self._scheduler.drain()
            if scenario.decode:
                yield from measured[_WARM_STEPS:]
            elif round_ > 0:
                yield from measured

    def _add(self, tokens: int, max_tokens: int) -> str:
        self._requests += 1
        name = f"profile-{self._requests}"
        prompt = Random(self._requests).choices(range(self._backend.spec.vocab_size), k=tokens)
        now_ns = self._clock.now_ns()
        self._scheduler.add(
            [Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), now_ns)], now_ns
        )
        return name

    def _step(self) -> "_Step":
        started_ns = self._clock.now_ns()
        batch = self._scheduler.schedule(started_ns)
        if batch is None:
            raise HeadraceError("the scheduler refuses the scenario: it is larger than the model's context or KV cache")
        self._backend.submit(batch)
        result = self._backend.collect()
        self._scheduler.update(batch, result, self._clock.now_ns())
        wall_ns = self._clock.now_ns() - started_ns
        tape = self._backend.tape
        return _Step(batch, wall_ns, sum(tape.phase_ns()), np.array(tape.record_ns(), np.float64))

    def _rows(self, busy: F64, batch: Batch) -> list[Row]:
        grouped: dict[tuple[str, str], list[int]] = {}
        for index, record in enumerate(self._records):
            if busy[index] > 0:
                grouped.setdefault((record.label, _name(record)), []).append(index)
        rows = []
        for (label, name), indices in grouped.items():
            work = [self._work(self._records[index], batch) for index in indices]
            moved, operations = (float(sum(column)) for column in zip(*work, strict=True))
            peak = self._peak(self._records[indices[0]])
            rows.append(Row(label, name, len(indices), float(busy[indices].sum()), moved, operations, peak))
        return rows

    def _work(self, record: _C.RecordInfo, batch: Batch) -> tuple[float, float]:
        """Bytes and operations of one record in this step."""
        rows = batch.num_rows if record.output_rows else batch.num_tokens
        if record.kind != "attention":
            return record.weight_bytes + record.row_bytes * rows, record.row_ops * rows
        group = self._backend.spec.kv_groups[record.group]
        attended, held = _context(batch, group)
        return record.row_bytes * rows + held * 4 * group.num_kv_heads * group.head_dim, record.row_ops * attended

    def _peak(self, record: _C.RecordInfo) -> float:
        limits = self._limits
        if record.weight.startswith("w"):
            return limits.int8
        if record.kind == "attention" or record.weight == "bf16":
            return limits.bf16 or limits.fp32
        return limits.fp32


@dataclass(frozen=True, slots=True)
class _Step:
    batch: Batch
    wall_ns: int
    kernel_ns: int
    record_ns: F64


def _context(batch: Batch, group: KVGroup) -> tuple[int, int]:
    """Positions that queries see, counted per query; and positions whose keys and values have to be read."""
    seen = batch.positions[0].astype(np.int64) + 1
    lengths = batch.seq_lens.astype(np.int64)
    if group.window:
        queries = np.diff(batch.cu_seqlens_q)
        seen, lengths = np.minimum(seen, group.window), np.minimum(lengths, group.window + queries - 1)
    return int(seen.sum()), int(lengths.sum())


def _name(record: _C.RecordInfo) -> str:
    if record.kind != "gemm":
        return f"{record.kind} {record.n}"
    return f"gemm {record.k}x{record.n} {record.weight}"


def table(profile: Profile, limits: Limits) -> Iterator[str]:
    """Lines for people. Rows of a millisecond column add up to the step."""
    wall = profile.wall_ns
    yield f"{profile.scenario.name}: {wall / 1e6:.3f} ms a step, {profile.tokens * 1e9 / wall:,.0f} tokens/s"
    if any(profile.line_ns):
        before, after = (f"{ns:.0f} ns" if ns else "unknown" for ns in profile.line_ns)
        yield f"  a cache line from one core to another: {before} before, {after} after"
    yield (
        f"  {'part':10} {'record':30} {'count':>5} {'ms':>8} {'share':>6} {'MB':>8} {'GB/s':>7} {'of read':>7} "
        f"{'GOP/s':>7} {'of peak':>7} {'of limit':>8}"
    )
    for row in sorted(profile.rows, key=lambda row: -row.ns):
        rate, speed = row.moved / row.ns, row.operations / row.ns
        gop = f"{speed:7.1f}" if row.operations else f"{'-':>7}"
        of_peak = f"{speed * 1e9 / row.peak:7.0%}" if row.peak and row.operations else f"{'-':>7}"
        yield (
            f"  {row.label:10} {row.name:30} {row.count:5} {row.ns / 1e6:8.3f} {row.ns / wall:6.1%} "
            f"{row.moved / 1e6:8.2f} {rate:7.1f} {rate * 1e9 / limits.read:7.0%} {gop} {of_peak} "
            f"{row.of_limit(limits):8.0%}"
        )
    for name, ns in (
        ("waiting for work, hand-overs", profile.idle_ns),
        ("outside the kernels (Python)", profile.outside_ns),
    ):
        yield f"  {'':10} {name:30} {'':5} {ns / 1e6:8.3f} {ns / wall:6.1%}"
    kinds: dict[str, float] = {}
    for row in profile.rows:
        kinds[row.label] = kinds.get(row.label, 0.0) + row.ns
    yield "  by part: " + ", ".join(
        f"{k} {ns / wall:.1%}" for k, ns in sorted(kinds.items(), key=lambda item: -item[1])
    )


def describe_limits(limits: Limits, threads: int, isa: str) -> str:
    products = (("int8", limits.int8), ("bf16", limits.bf16), ("fp32", limits.fp32))
    named = ", ".join(f"{name} {value / 1e9:,.0f} GOP/s" if value else f"{name} -" for name, value in products)
    return f"limits measured here, {isa}, {_threads(threads)}: read {limits.read / 1e9:.1f} GB/s, {named}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def run_all(
    profiler: Profiler, scenarios: Sequence[Scenario], repeats: int, report: Callable[[str, float], None]
) -> list[Profile]:
    profiles = []
    for index, scenario in enumerate(scenarios):
        report(scenario.name, index / len(scenarios))
        profiles.append(profiler.run(scenario, repeats))
    return profiles
