"""A layer's paged cache with known keys and values, its attention through a kernel table, and the same in float64.

Blocks lie in random order, and every slot that no token owns holds NaN, as a pool that was used before may.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace._C import Kernels

PARTITION = 256
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]


def to_bf16(x: F32) -> U16:
    """Round to nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x: U16) -> F32:
    return (x.astype(np.uint32) << 16).view(np.float32)


def hadamard(dim: int) -> F64:
    """The +1 and -1 that int8 keys, and queries, are turned by: blocks of the largest power of two that divides dim."""
    size = dim & -dim
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(dim // size), matrix)


@dataclass(frozen=True)
class Shape:
    """What a model and a step fix."""

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 32
    window: int = 0
    softcap: float = 0.0
    filler: int = 0x7FC1  # every 16 bits of what no token has written: a NaN
    dtype: str = "bf16"


def empty_caches(num_blocks: int, s: Shape) -> tuple[U8, U8]:
    """K and V of `num_blocks` blocks: bytes [block, kv_head, bytes of a head], every 16 bits of them the filler."""
    shape = (num_blocks, s.kv_heads, Kernels.kv_head_bytes(s.dtype, s.head_dim, s.block_size))
    k, v = (np.full((*shape[:2], shape[2] // 2), s.filler, np.uint16).view(np.uint8) for _ in range(2))
    return k, v


def read_keys(cache: U8, s: Shape, slots: I32) -> F64:
    """[slot, kv_head, head_dim] of `slots`: the key that a query is multiplied by."""
    if s.dtype == "bf16":
        words = cache.view(np.uint16).reshape(len(cache), s.kv_heads, s.head_dim // 2, s.block_size, 2)
        by_slot = words.transpose(0, 3, 1, 2, 4).reshape(-1, s.kv_heads, s.head_dim)[slots]
        return from_bf16(by_slot).astype(np.float64)
    quads, scale = _int8_parts(cache, s, slots)
    values = quads.reshape(len(cache), s.kv_heads, s.head_dim // 4, s.block_size, 4).transpose(0, 3, 1, 2, 4)
    return (values.reshape(-1, s.kv_heads, s.head_dim)[slots] - 128.0) * scale @ hadamard(s.head_dim)


def read_values(cache: U8, s: Shape, slots: I32) -> F64:
    """[slot, kv_head, head_dim] of `slots`."""
    if s.dtype == "bf16":
        words = cache.view(np.uint16).reshape(len(cache), s.kv_heads, s.block_size // 2, s.head_dim, 2)
        by_slot = words.transpose(0, 2, 4, 1, 3).reshape(-1, s.kv_heads, s.head_dim)[slots]
        return from_bf16(by_slot).astype(np.float64)
    quads, scale = _int8_parts(cache, s, slots)
    values = quads.reshape(len(cache), s.kv_heads, s.block_size // 4, s.head_dim, 4).transpose(0, 2, 4, 1, 3)
    return (values.reshape(-1, s.kv_heads, s.head_dim)[slots] - 128.0) * scale


def round_query(q: F64) -> F64:
    """[..., head_dim] as q is rounded over int8 caches: turned, to 127 steps of the largest input, and turned back."""
    turn = hadamard(q.shape[-1])
    turned = q @ turn
    step = np.abs(turned).max(-1, keepdims=True) / 127
    return np.round(turned / step) * step @ turn / (q.shape[-1] & -q.shape[-1])


def _int8_parts(cache: U8, s: Shape, slots: I32) -> tuple[U8, F64]:
    """The bytes [block, kv_head, ...] of all, and the scales [slot, kv_head, 1] of `slots`."""
    size = s.head_dim * s.block_size
    scales = np.ascontiguousarray(cache[:, :, size:]).view(np.float32).transpose(0, 2, 1).reshape(-1, s.kv_heads, 1)
    return cache[:, :, :size], scales[slots].astype(np.float64)


@dataclass
class PagedCache:
    shape: Shape
    keys: list[F64] = field(default_factory=list)  # per sequence [length, kv_heads, head_dim], as the cache has them
    values: list[F64] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.shape
        rng = np.random.default_rng(7)
        counts = [-(-length // s.block_size) for length in s.seq_lens]
        num_blocks = sum(counts) + 2
        self.k_cache: U8
        self.v_cache: U8
        self.k_cache, self.v_cache = empty_caches(num_blocks, s)
        self.block_table: I32 = np.full((len(counts), max(counts)), -1, np.int32)
        order = iter(rng.permutation(num_blocks))
        writer = Kernels("reference")
        for seq, length in enumerate(s.seq_lens):
            self.block_table[seq, : counts[seq]] = [next(order) for _ in range(counts[seq])]
            k, v = rng.standard_normal((2, length, s.kv_heads, s.head_dim)).astype(np.float32)
            slots = self.slots(seq, length)
            writer.kv_write(k, v, self.k_cache, self.v_cache, slots, s.head_dim, s.block_size, s.dtype)
            self.keys.append(read_keys(self.k_cache, s, slots))
            self.values.append(read_values(self.v_cache, s, slots))
        self.cu_seqlens_q: I32 = np.cumsum([0, *s.q_lens]).astype(np.int32)
        self.q: F32 = rng.standard_normal((sum(s.q_lens), s.heads * s.head_dim)).astype(np.float32)

    def slots(self, seq: int, length: int) -> I32:
        position = np.arange(length)
        size = self.shape.block_size
        return (self.block_table[seq, position // size] * size + position % size).astype(np.int32)

    def spoil(self, side: str, seq: int, position: int) -> None:
        """Makes the K or V of a token a NaN, in every head."""
        s = self.shape
        block, token = self.block_table[seq, position // s.block_size], position % s.block_size
        part = (self.k_cache if side == "key" else self.v_cache)[block]
        if s.dtype == "int8":
            part.view(np.float32)[:, s.head_dim * s.block_size // 4 + token] = np.nan
        elif side == "key":
            part.view(np.uint16).reshape(s.kv_heads, s.head_dim // 2, s.block_size, 2)[:, :, token] = 0x7FC1
        else:
            words = part.view(np.uint16).reshape(s.kv_heads, s.block_size // 2, s.head_dim, 2)
            words[:, token // 2, :, token % 2] = 0x7FC1

    def first_position(self, seq: int, token: int) -> int:
        """Position of a token of the step."""
        return self.shape.seq_lens[seq] - int(self.cu_seqlens_q[seq + 1]) + token

    def items(self, tokens: int, split: int, partition: int) -> I32:
        """Work items of `tokens` query tokens; with `split`, of so many partitions each, to be merged."""
        items: list[tuple[int, ...]] = []
        for seq in range(len(self.shape.seq_lens)):
            begin, end = int(self.cu_seqlens_q[seq]), int(self.cu_seqlens_q[seq + 1])
            for head in range(self.shape.kv_heads):
                for first in range(begin, end, tokens):
                    last = min(first + tokens, end)
                    partitions = -(-(self.first_position(seq, last - 1) + 1) // partition)
                    step = split or partitions
                    for part in range(0, partitions, step):
                        partial = sum(item[5] - item[4] for item in items) if split else -1
                        items.append((seq, head, first, last, part, min(part + step, partitions), partial))
        return np.array(items, np.int32)

    def attend(self, kernels: Kernels, tokens: int = 8, split: int = 0, partition: int = PARTITION) -> F32:
        s = self.shape
        out: F32 = np.full_like(self.q, np.nan)
        lengths = np.array(s.seq_lens, np.int32)
        tables = (self.k_cache, self.v_cache, self.block_table, self.cu_seqlens_q, lengths)
        form = (s.head_dim, s.block_size, s.dtype, s.head_dim**-0.5, s.window, s.softcap)
        kernels.attention(self.q, out, *tables, *form, self.items(tokens, split, partition), partition)
        return out

    def exact(self) -> F64:
        """The same in float64, one query at a time. Over int8 caches q has 8 bits there too."""
        s = self.shape
        out = np.empty(self.q.shape, np.float64).reshape(-1, s.heads, s.head_dim)
        queries = self.q.astype(np.float64).reshape(out.shape)
        if s.dtype == "int8":
            queries = round_query(queries)
        for seq in range(len(s.seq_lens)):
            for token in range(self.cu_seqlens_q[seq], self.cu_seqlens_q[seq + 1]):
                end = self.first_position(seq, token) + 1
                begin = max(0, end - s.window) if s.window else 0
                for head in range(s.heads):
                    kv_head = head // (s.heads // s.kv_heads)
                    scores = self.keys[seq][begin:end, kv_head] @ queries[token, head] * s.head_dim**-0.5
                    if s.softcap:
                        scores = s.softcap * np.tanh(scores / s.softcap)
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights / weights.sum() @ self.values[seq][begin:end, kv_head]
        return out.reshape(self.q.shape)
