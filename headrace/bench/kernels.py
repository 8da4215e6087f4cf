"""How fast each kernel is on one core, against what that core can do: `headrace bench kernels`.

    Case -> measure() -> Measurement -> lines of a table, or JSON

Peaks and kernels are measured by the same thread in the same process. A time is the fastest of many samples, for peaks
and kernels alike, less what the call costs without work, so that neither neighbours nor Python count.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace import _C
from headrace.bench.kernel_cases import Case, Plan, cases
from headrace.bench.profile import Limits

_SAMPLE_NS = 300_000  # calls are repeated until they take about so long
_SAMPLES = 5  # at least


@dataclass(frozen=True, slots=True)
class Measurement:
    """Fractions are of one core's limits; None where the kernel has no such limit."""

    isa: str
    kernel: str
    shape: str
    rows: int
    us: float
    gb_per_s: float
    of_read: float
    gop_per_s: float | None
    of_peak: float | None


def instruction_sets() -> list[str]:
    """Those that this machine runs in silicon, best first."""
    return [name for name in _C.instruction_sets() if name in ("avx512", "avx2")] or ["reference"]


def run(isa: str, plan: Plan, limits: Limits, seconds: float) -> Iterator[Measurement]:
    """`seconds` go into each, about. Raises ValueError for an instruction set that this machine lacks."""
    for case in cases(_C.Kernels(isa), plan):
        yield measure(isa, case, limits, seconds)


def measure(isa: str, case: Case, limits: Limits, seconds: float) -> Measurement:
    ns = max(1.0, fastest_ns(case.call, seconds) - fastest_ns(case.empty, seconds / 4)) * case.scale
    peak = {"int8": limits.int8, "bf16": limits.bf16 or limits.fp32, "fp32": limits.fp32}.get(case.peak, 0.0)
    rate, speed = case.moved / ns, case.operations / ns
    return Measurement(
        isa,
        case.kernel,
        case.shape,
        case.rows,
        ns / 1e3,
        rate,
        rate * 1e9 / limits.read,
        speed if case.operations else None,
        speed * 1e9 / peak if peak and case.operations else None,
    )


def fastest_ns(call: Callable[[], object], seconds: float) -> float:
    """Of one call, in the fastest of the samples that fit into `seconds`."""
    call()  # pages and caches
    began = time.perf_counter_ns()
    call()
    calls = max(1, int(_SAMPLE_NS / max(1, time.perf_counter_ns() - began)))
    times: list[float] = []
    while len(times) < _SAMPLES or time.perf_counter_ns() < began + seconds * 1e9:
        started = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - started) / calls)
    return min(times)


def header() -> str:
    where = f"{'isa':9} {'kernel':17} {'shape':27} {'rows':>4}"
    return f"{where} {'us':>10} {'GB/s':>7} {'of read':>7} {'GOP/s':>7} {'of peak':>7}"


def line(m: Measurement) -> str:
    speed = f"{m.gop_per_s:7.1f}" if m.gop_per_s is not None else f"{'-':>7}"
    of_peak = f"{m.of_peak:7.0%}" if m.of_peak is not None else f"{'-':>7}"
    where = f"{m.isa:9} {m.kernel:17} {m.shape:27} {m.rows:4}"
    return f"{where} {m.us:10.2f} {m.gb_per_s:7.1f} {m.of_read:7.0%} {speed} {of_peak}"
