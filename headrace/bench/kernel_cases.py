"""The calls that `headrace bench kernels` times: one kernel, one shape, one number of rows each.

    Plan, Kernels -> cases() -> Case: a call, and what it moves and multiplies

For up to eight rows weights come from memory: the calls walk through one arena that no cache holds. Beyond, and for the
other kernels, data comes from wherever it fits, as in a step; only long contexts exceed the caches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import get_args

import numpy as np
import numpy.typing as npt

from headrace._C import Activations, Kernels, Weight
from headrace.core.batch import I32
from headrace.core.batch_builder import ScheduledSequence, build_batch
from headrace.core.kv_group import KVDtype
from headrace.core.request import Request, SamplingParams

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
# Outputs and inputs of SmolLM2-135M's layers; K-quants need inputs in multiples of 256 and get 768 where it has 576.
LAYERS = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
HEADS = {"SmolLM2-135M": (9, 3, 64), "Llama-3.2-1B": (32, 8, 64)}  # query heads, KV heads, head dim
WIDTHS = (576, 2048)
VOCAB = 49152
SAMPLERS = {"greedy": SamplingParams(temperature=0.0), "top-p": SamplingParams(temperature=0.8, top_p=0.9)}
BLOCK_SIZE, PARTITION = 32, 256
TILE_ROWS = 24  # of an item, as csrc/worklist.cpp makes them
SEQUENCES = 8  # of a decoding step of attention
PREFILL = (2048, 64)  # context, and the tokens at its end that ask
COLD_ROWS, COLD_BYTES = 8, 128 << 20
CALL_OPERATIONS = 5e7  # of a piece of something large: a fraction of a millisecond


@dataclass(frozen=True, slots=True)
class Plan:
    kernels: tuple[str, ...]
    formats: tuple[str, ...]
    layers: tuple[str, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    shape: str
    rows: int
    moved: float  # bytes that have to be read
    operations: float  # two a multiply-add; 0: not what it is about
    peak: str  # "int8", "bf16", "fp32": the products they are made of
    call: Callable[[], object]
    empty: Callable[[], object]  # the same call without work: what Python costs
    scale: float = 1.0  # calls that make up the whole


def cases(kernels: Kernels, plan: Plan) -> Iterator[Case]:
    """Made one by one: memory of a case is gone when the next is asked for."""
    if "gemm" in plan.kernels:
        for name in plan.formats:
            for layer in plan.layers:
                yield from _gemm(kernels, name, layer, plan.rows)
    if "attention" in plan.kernels:
        for model, dtype in product(HEADS, get_args(KVDtype)):
            yield _attention(kernels, dtype, model, 1, *PREFILL)
            for context in plan.contexts:
                yield _attention(kernels, dtype, model, SEQUENCES, context, 1)
    if "norm_quant" in plan.kernels:
        for width in WIDTHS:
            yield from (_norm_quant(kernels, width, rows) for rows in plan.rows)
    if "sample" in plan.kernels:
        for name in SAMPLERS:
            yield from (_sample(kernels, name, rows) for rows in plan.rows if rows <= 64)


def random_rows(name: str, n: int, k: int) -> npt.NDArray[np.uint8]:
    """Blocks of random finite weights of a GGUF format: uint8 [n, bytes of k inputs]."""
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


def _gemm(kernels: Kernels, name: str, layer: str, rows: tuple[int, ...]) -> Iterator[Case]:
    n, k = LAYERS[layer]
    number, inputs, _, _ = FORMATS[name]
    k = -(-k // inputs) * inputs
    raw = random_rows(name, n, k)
    warm = kernels.pack(raw, number, k)
    copies = -(-COLD_BYTES // warm.nbytes) if min(rows) <= COLD_ROWS else 1
    cold = kernels.pack(np.tile(raw, (copies, 1)), number, k) if copies > 1 else warm
    peak = {"BF16": "bf16", "F16": "fp32", "F32": "fp32"}.get(name, "int8")
    for count in rows:
        weight = cold if count <= COLD_ROWS else warm
        a = kernels.norm_quant(np.random.default_rng(1).standard_normal((count, k), np.float32))
        operations = 2.0 * count * n * k
        share = min(warm.num_panels, max(1, round(warm.num_panels * CALL_OPERATIONS / operations)))
        call, empty = _walk(kernels, weight, a, share)
        scale = warm.num_panels / share
        yield Case(f"gemm {name}", f"{layer} {n}x{k}", count, warm.nbytes, operations, peak, call, empty, scale)


def _walk(
    kernels: Kernels, weight: Weight, a: Activations, share: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A call takes the next `share` panels of the weight, round and round; and the same without any."""
    out = np.zeros((len(np.asarray(a.f32)), 32 * weight.num_panels), np.float32)
    starts = cycle(range(0, weight.num_panels - share + 1, share))

    def call() -> None:
        begin = next(starts)
        kernels.gemm(weight, a, out, panels=(begin, begin + share))

    def empty() -> None:
        begin = next(starts)
        kernels.gemm(weight, a, out, panels=(begin, begin))

    return call, empty


def _attention(kernels: Kernels, dtype: KVDtype, model: str, sequences: int, context: int, chunk: int) -> Case:
    heads, kv_heads, dim = HEADS[model]
    blocks = -(-context // BLOCK_SIZE)
    pool, rng = blocks * sequences, np.random.default_rng(1)
    k_cache = np.empty((pool, kv_heads, kernels.kv_head_bytes(dtype, dim, BLOCK_SIZE)), np.uint8)
    v_cache = np.empty_like(k_cache)
    slots = np.arange(pool * BLOCK_SIZE, dtype=np.int32)
    k, v = (rng.standard_normal((len(slots), kv_heads, dim), np.float32) for _ in range(2))
    kernels.kv_write(k, v, k_cache, v_cache, slots, dim, BLOCK_SIZE, dtype)
    table = rng.permutation(pool).astype(np.int32).reshape(sequences, blocks)
    cu_seqlens = (np.arange(sequences + 1) * chunk).astype(np.int32)
    lengths = np.full(sequences, context, np.int32)
    q = rng.standard_normal((sequences * chunk, heads * dim), np.float32)
    out, items = np.empty_like(q), _items(sequences, context, chunk, HEADS[model])

    seen = sum(range(context - chunk + 1, context + 1)) * sequences
    operations = 4.0 * heads * dim * seen  # scores and values that a causal mask leaves
    # Items of decoding are alike, so a few in turn tell of all; those of a prompt see more and more.
    share = min(len(items), max(1, round(len(items) * CALL_OPERATIONS / operations))) if chunk == 1 else len(items)
    starts = cycle(range(0, len(items) - share + 1, share))

    def run(count: int) -> None:
        begin = next(starts)
        few = items[begin : begin + count]
        form = (dim, BLOCK_SIZE, dtype, dim**-0.5, 0, 0.0)
        kernels.attention(q, out, k_cache, v_cache, table, cu_seqlens, lengths, *form, few)

    kind = "decode" if chunk == 1 else "prefill"
    moved = 2.0 * k_cache.nbytes  # keys and values, once
    return Case(
        f"attention {kind} {dtype}",
        f"{model}, context {context}",
        sequences * chunk,
        moved,
        operations,
        "bf16",
        lambda: run(share),
        lambda: run(0),
        len(items) / share,
    )


def _items(sequences: int, context: int, chunk: int, shape: tuple[int, int, int]) -> I32:
    heads, kv_heads, _ = shape
    tile = max(1, TILE_ROWS // (heads // kv_heads))
    items = []
    for seq in range(sequences):
        for head in range(kv_heads):
            for first in range(0, chunk, tile):
                last = min(first + tile, chunk)
                partitions = -(-(context - chunk + last) // PARTITION)
                items.append((seq, head, seq * chunk + first, seq * chunk + last, 0, partitions, -1))
    return np.array(items, np.int32)


def _norm_quant(kernels: Kernels, width: int, rows: int) -> Case:
    rng = np.random.default_rng(1)
    x, gain = rng.standard_normal((rows, width), np.float32), rng.standard_normal(width, np.float32)
    out = Activations(rows, width, False, True)
    none = x[:0]
    return Case(
        "norm_quant",
        f"{width}",
        rows,
        5.0 * rows * width,  # float32 in, int8 out
        0.0,
        "",
        lambda: kernels.norm_quant(x, gain, want_f32=False, out=out),
        lambda: kernels.norm_quant(none, gain, want_f32=False, out=out),
    )


def _sample(kernels: Kernels, name: str, rows: int) -> Case:
    request = Request("r", [0], SAMPLERS[name], 0)
    sequence = ScheduledSequence(request, 0, 1, (np.zeros(1, np.int32),))
    batch = build_batch(0, [sequence] * rows, 1, [], VOCAB)
    tiny = build_batch(0, [sequence] * rows, 1, [], 1)
    logits = (3 * np.random.default_rng(1).standard_normal((rows, VOCAB))).astype(np.float32)
    single = logits[:, :1].copy()
    return Case(
        f"sample {name}",
        f"{VOCAB}",
        rows,
        4.0 * rows * VOCAB,
        0.0,
        "",
        lambda: kernels.sample(logits, batch, 0),
        lambda: kernels.sample(single, tiny, 0),
    )
