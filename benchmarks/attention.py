"""Attention speed on one core, as a fraction of what the core can do: peak and kernel measured in the same process.

Prefill: the last `chunk` tokens of a 2,048-token context. Decode: one token of eight sequences at each context, blocks
taken from a pool larger than the caches. Gflop/s count the scores and values that a causal mask leaves (4 x heads x
head dim for each query and key), against the peak of VDPBF16PS, or of f32 FMA for the other kernels; GB/s count the
keys and values read once. Times are the fastest of many samples. Needs a C++ compiler for the peaks.

    python benchmarks/attention.py [--isa avx2] [--block-size 32] [--prefill 256,512] [--decode 128,1024,8192]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from peaks import PeakLibrary, fastest

from headrace._C import Kernels

MODELS = {"SmolLM2-135M": (9, 3, 64), "Llama-3.2-1B": (32, 8, 64)}  # query heads, KV heads, head dim
PARTITION = 256
TILE_ROWS = 24  # of an item, as csrc/worklist.cpp makes them
CONTEXT = 2048
SEQUENCES = 8


@dataclass(frozen=True)
class Work:
    """A step of attention: `sequences` of `context` tokens, of which the last `chunk` ask."""

    model: str
    sequences: int
    context: int
    chunk: int

    @property
    def flops(self) -> float:
        heads, _, dim = MODELS[self.model]
        seen = sum(range(self.context - self.chunk + 1, self.context + 1))
        return 4.0 * heads * dim * seen * self.sequences

    @property
    def bytes(self) -> float:
        _, kv_heads, dim = MODELS[self.model]
        return 4.0 * kv_heads * dim * self.context * self.sequences


def items_of(work: Work) -> npt.NDArray[np.int32]:
    heads, kv_heads, _ = MODELS[work.model]
    tile = max(1, TILE_ROWS // (heads // kv_heads))
    items = []
    for seq in range(work.sequences):
        for head in range(kv_heads):
            for first in range(0, work.chunk, tile):
                last = min(first + tile, work.chunk)
                partitions = -(-(work.context - work.chunk + last) // PARTITION)
                items.append((seq, head, seq * work.chunk + first, seq * work.chunk + last, 0, partitions, -1))
    return np.array(items, np.int32)


def measure(kernels: Kernels, work: Work, block_size: int, samples: int) -> float:
    """Seconds of the step's attention in one layer."""
    heads, kv_heads, dim = MODELS[work.model]
    rng = np.random.default_rng(1)
    blocks = -(-work.context // block_size)
    pool = blocks * work.sequences
    k_cache = np.empty((pool, kv_heads, dim // 2, block_size, 2), np.uint16)
    v_cache = np.empty((pool, kv_heads, block_size // 2, dim, 2), np.uint16)
    tokens = pool * block_size
    k, v = (rng.standard_normal((tokens, kv_heads, dim), np.float32) for _ in range(2))
    kernels.kv_write(k, v, k_cache, v_cache, np.arange(tokens, dtype=np.int32))
    table = rng.permutation(pool).astype(np.int32).reshape(work.sequences, blocks)
    cu_seqlens = (np.arange(work.sequences + 1) * work.chunk).astype(np.int32)
    lengths = np.full(work.sequences, work.context, np.int32)
    q = rng.standard_normal((work.sequences * work.chunk, heads * dim), np.float32)
    out, items = np.empty_like(q), items_of(work)
    run = lambda: kernels.attention(  # noqa: E731
        q, out, k_cache, v_cache, table, cu_seqlens, lengths, dim**-0.5, 0, 0.0, items
    )
    run()
    return fastest(run, samples)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--prefill", default="256,512")
    parser.add_argument("--decode", default="128,512,2048,8192")
    parser.add_argument("--samples", type=int, default=15)
    options = parser.parse_args(arguments)
    kernels = Kernels(options.isa)
    peak = PeakLibrary().gops("dpbf16" if kernels.name == "avx512" else "fma")
    print(f"{kernels.name}, one core: peak {peak:.0f} Gflop/s")
    print(
        f"{'model':13} {'work':7} {'seqs':>4} {'context':>7} {'chunk':>5} {'ms':>8} {'Gflop/s':>8} "
        f"{'of peak':>7} {'GB/s':>6}"
    )
    for model in MODELS:
        works = [Work(model, 1, CONTEXT, int(n)) for n in options.prefill.split(",") if n]
        works += [Work(model, SEQUENCES, int(n), 1) for n in options.decode.split(",") if n]
        for work in works:
            seconds = measure(kernels, work, options.block_size, options.samples)
            rate = work.flops / seconds * 1e-9
            kind = "decode" if work.chunk == 1 else "prefill"
            print(
                f"{model:13} {kind:7} {work.sequences:4} {work.context:7} {work.chunk:5} {seconds * 1e3:8.3f}"
                f" {rate:8.1f} {rate / peak:7.0%} {work.bytes / seconds * 1e-9:6.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
