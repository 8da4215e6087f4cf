"""`headrace bench kernels`: every kernel on one core, against what that core can do at most."""

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.config import nearest, option
from headrace.base.errors import ConfigError, HeadraceError
from headrace.cli.options import Command, numbers, read

if TYPE_CHECKING:
    from headrace.bench.kernel_cases import Plan

KERNELS = ("gemm", "attention", "norm_quant", "sample")


@dataclass(frozen=True)
class KernelOptions:
    """Lists are separated by commas."""

    kernels: str = option(",".join(KERNELS), "Kernels to measure.")
    formats: str = option("Q4_1,Q8_0,Q5_0,Q4_K,Q6_K,BF16", "Weight formats of GEMMs.")
    layers: str = option("qkv,o,gate_up,down,head", "Shapes of GEMMs: layers of SmolLM2-135M.")
    rows: str = option("1,4,16,256", "Rows of GEMMs, norms and samplers (samplers: up to 64).")
    contexts: str = option("128,1024,4096", "Contexts of attention in decoding.")
    isas: str = option("", "Instruction sets; empty: all that this machine runs in silicon.")
    milliseconds: float = option(100.0, "Time that goes into each measurement.", minimum=0.1)
    json: str = option("", "Write limits and results to this JSON file; - writes JSON to standard output.")


COMMAND = Command(
    "bench kernels",
    "Measure every kernel on one core against the peaks of that core, measured in the same process.",
    KernelOptions,
    config_fields=(),
)


def main(arguments: Sequence[str]) -> int:
    own = read(COMMAND, arguments).own
    from headrace._C import instruction_sets as available
    from headrace.bench import kernels
    from headrace.bench.profile import describe_limits, measure_limits

    plan = _plan(own)
    isas = _words("--isas", own.isas, available()) if own.isas else kernels.instruction_sets()
    say = print if own.json != "-" else _silent
    found = []
    for isa in isas:
        limits = measure_limits(1, isa)
        say(describe_limits(limits, 1, isa))
        say(kernels.header())
        measurements = []
        for measurement in kernels.run(isa, plan, limits, own.milliseconds / 1e3):
            say(kernels.line(measurement))
            measurements.append(asdict(measurement))
        found.append({"isa": isa, "limits": asdict(limits), "measurements": measurements})
    if own.json:
        _write(own.json, json.dumps(found, indent=1) + "\n")
    return 0


def _silent(_line: str) -> None:
    pass


def _plan(own: KernelOptions) -> "Plan":
    from headrace.bench.kernel_cases import FORMATS, LAYERS, Plan

    return Plan(
        kernels=_words("--kernels", own.kernels, KERNELS),
        formats=_words("--formats", own.formats, FORMATS),
        layers=_words("--layers", own.layers, LAYERS),
        rows=numbers("--rows", own.rows, 4096),
        contexts=numbers("--contexts", own.contexts, 1 << 17),
    )


def _words(flag: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in known:
            raise ConfigError(f"{flag}: {word!r} is not one of {', '.join(known)}{nearest(word, known)}")
    return words


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise HeadraceError(f"--json {path}: {error.strerror or error}; the table is above") from error
