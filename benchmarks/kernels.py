"""GEMM speed on one core, as fractions of what the core can do: peaks and kernels measured in the same process.

For each format, layer shape of SmolLM2-135M and number of rows: GB/s of weights against the read bandwidth of memory,
and Gop/s (two per multiply-add) against the peak of VPDPBUSD or VPMADDUBSW. Up to eight rows, weights come from memory
(copies are taken in turn); beyond, from the caches. Times are the fastest of many samples of about a millisecond, for
peaks and kernels alike, so that a busy machine hurts less. Needs a C++ compiler for the peaks.

    python benchmarks/kernels.py [--formats Q4_1,Q8_0] [--rows 1,4,16,256] [--isa avx2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
from peaks import PeakLibrary, fastest

from headrace._C import Kernels, Weight

# GGUF's number, inputs and bytes of a block, and where its f16 scales lie.
FORMATS: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "F32": (0, 1, 4, ()),
    "F16": (1, 1, 2, ()),
    "BF16": (30, 1, 2, ()),
    "Q4_0": (2, 32, 18, (0,)),
    "Q4_1": (3, 32, 20, (0, 2)),
    "Q5_0": (6, 32, 22, (0,)),
    "Q5_1": (7, 32, 24, (0, 2)),
    "Q8_0": (8, 32, 34, (0,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q5_K": (13, 256, 176, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
}
# Outputs and inputs of the layers; K-quants need inputs in multiples of 256 and get 768 where the model has 576.
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
COLD_ROWS = 8
COLD_BYTES = 64 << 20


@dataclass(frozen=True)
class Result:
    """One measurement; fractions are of the peaks."""

    format: str
    layer: str
    rows: int
    weight_mb: float
    gb_per_s: float
    gop_per_s: float
    of_memory: float
    of_peak: float


class Peaks:
    """The yardsticks, from peaks.cpp: Gop/s of byte multiply-adds and GB/s of reading."""

    def __init__(self) -> None:
        library = PeakLibrary()
        self.instruction = "VPDPBUSD" if library.has_vnni else "VPMADDUBSW"
        self.gop_per_s = library.gops("dpbusd" if library.has_vnni else "maddubs")
        memory = np.ones(256 << 20, np.uint8)
        piece = 1 << 20
        offsets = cycle(range(0, len(memory), piece))
        read = lambda: library.read_memory(memory.ctypes.data + next(offsets), piece)  # noqa: E731
        self.gb_per_s = piece / fastest(read, 1000) * 1e-9


def random_rows(name: str, n: int, k: int) -> npt.NDArray[np.uint8]:
    _, inputs, size, scales = FORMATS[name]
    rng = np.random.default_rng(0)
    if name == "F32":
        return rng.standard_normal((n, k), np.float32).view(np.uint8)
    blocks = rng.integers(0, 128 if inputs == 1 else 256, (n, k // inputs, size), np.uint8)
    if inputs == 1:
        blocks[:, :, 1] &= 0x3F  # finite
    for at in scales:
        blocks[:, :, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    return blocks.reshape(n, -1)


def measure(kernels: Kernels, peaks: Peaks, name: str, layer: str, rows: int) -> Result:
    n, k = SHAPES[layer]
    number, inputs, _, _ = FORMATS[name]
    k = -(-k // inputs) * inputs
    raw = random_rows(name, n, k)
    first = kernels.pack(raw, number, k)
    copies = max(1, COLD_BYTES // first.nbytes) if rows <= COLD_ROWS else 1
    weights: cycle[Weight] = cycle([first, *(kernels.pack(raw, number, k) for _ in range(copies - 1))])
    a = kernels.norm_quant(np.random.default_rng(1).standard_normal((rows, k), np.float32))
    out = np.zeros((rows, n), np.float32)
    panels = first.num_panels
    operations = 2 * rows * n * k
    share = min(panels, max(1, round(panels * 2e8 / operations)))  # panels in a sample of about a millisecond

    starts = cycle(range(0, panels - share + 1, share))
    calls = max(1, int(2e8 / operations))
    whole = share == panels

    def sample() -> None:
        for _ in range(calls if whole else 1):
            begin = 0 if whole else next(starts)
            kernels.gemm(next(weights), a, out, panels=(begin, begin + share))

    sample()
    fraction = (calls if whole else 1) * share / panels
    seconds = fastest(sample, 150 if rows <= COLD_ROWS else 60) / fraction
    gb, gop = first.nbytes / seconds * 1e-9, operations / seconds * 1e-9
    return Result(name, layer, rows, first.nbytes / 1e6, gb, gop, gb / peaks.gb_per_s, gop / peaks.gop_per_s)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q4_1,Q8_0,Q5_0,Q4_K,Q6_K,BF16")
    parser.add_argument("--layers", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,4,16,256")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    kernels, peaks = Kernels(options.isa), Peaks()
    print(f"{kernels.name}, one core: {peaks.instruction} {peaks.gop_per_s:.0f} Gop/s, read {peaks.gb_per_s:.1f} GB/s")
    print(f"{'format':6} {'layer':8} {'rows':>4} {'MB':>6} {'GB/s':>6} {'of read':>7} {'Gop/s':>6} {'of peak':>7}")
    results = []
    for name in options.formats.split(","):
        for layer in options.layers.split(","):
            for rows in map(int, options.rows.split(",")):
                r = measure(kernels, peaks, name, layer, rows)
                results.append(r)
                speed = f"{r.gb_per_s:6.1f} {r.of_memory:7.0%} {r.gop_per_s:6.0f} {r.of_peak:7.0%}"
                print(f"{name:6} {layer:8} {rows:4} {r.weight_mb:6.2f} {speed}", flush=True)
    if options.json:
        peak = {"instruction": peaks.instruction, "gop_per_s": peaks.gop_per_s, "gb_per_s": peaks.gb_per_s}
        options.json.write_text(
            json.dumps({"isa": kernels.name, "peaks": peak, "results": [asdict(r) for r in results]})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
