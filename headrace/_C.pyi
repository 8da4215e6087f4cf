# ruff: noqa: N999
"""Native kernels of the CPU backend (docs/kernels.md)."""

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

def instruction_sets() -> list[str]:
    """Names of the kernel tables this machine can run, best first."""

class Weight:
    """A matrix packed for one instruction set."""

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def format(self) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def has_min(self) -> bool: ...
    @property
    def scale_f32(self) -> bool: ...
    @property
    def interleave(self) -> bool: ...
    @property
    def num_panels(self) -> int: ...
    @property
    def panel_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> object: ...

class Matrix:
    """Float rows, or some columns of them."""

    def __init__(self, rows: int, width: int) -> None: ...
    def columns(self, begin: int, count: int) -> Matrix: ...
    @property
    def array(self) -> object: ...

class KVCache:
    """Keys and values of one KV group's layers, bf16 or int8, in blocks."""

    def __init__(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str = "bf16"
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def copy(self, source: int, destination: int) -> None: ...
    def read(self, ids: NDArray[numpy.int32]) -> bytes: ...
    def write(self, ids: NDArray[numpy.int32], data: bytes) -> None: ...

class Activations:
    """Rows as a GEMM reads them: f32, or int8 with scales and sums."""

    def __init__(self, rows: int, k: int, want_f32: bool, want_q: bool) -> None: ...
    @property
    def f32(self) -> object: ...
    @property
    def q(self) -> object: ...
    @property
    def scale(self) -> object: ...
    @property
    def sum(self) -> object: ...

class Kernels:
    """The kernels of one instruction set, each by itself on NumPy arrays."""

    def __init__(self, isa: str = "auto") -> None: ...
    @property
    def name(self) -> str: ...
    @staticmethod
    def kv_head_bytes(dtype: str, head_dim: int, block_size: int) -> int:
        """Bytes of a KV head's K, or V, in a block."""

    def pack(self, rows: NDArray[numpy.uint8], type: int, k: int, up: NDArray[numpy.uint8] | None = None) -> Weight: ...
    def norm_quant(
        self,
        x: NDArray[numpy.float32],
        gain: NDArray[numpy.float32] | None = None,
        eps: float = 9.999999747378752e-06,
        want_f32: bool = True,
        want_q: bool = True,
        out: Activations | None = None,
    ) -> Activations: ...
    def gemm(
        self,
        w: Weight,
        a: Activations,
        out: NDArray[numpy.float32],
        bias: NDArray[numpy.float32] | None = None,
        epilogue: int = 0,
        panels: Sequence[int] = [0, -1],
        rows: Sequence[int] = [0, -1],
    ) -> None: ...
    def norm_rows(
        self,
        x: NDArray[numpy.float32],
        gain: NDArray[numpy.float32],
        eps: float,
        out: NDArray[numpy.float32],
        add: bool = False,
    ) -> None: ...
    def head_norm_rope(
        self,
        x: NDArray[numpy.float32],
        heads: int,
        head_dim: int,
        gain: NDArray[numpy.float32] | None,
        eps: float,
        rotary_dim: int,
        cos_sin: NDArray[numpy.float32],
    ) -> None: ...
    def kv_write(
        self,
        k: NDArray[numpy.float32],
        v: NDArray[numpy.float32],
        k_cache: NDArray[numpy.uint8],
        v_cache: NDArray[numpy.uint8],
        slots: NDArray[numpy.int32],
        head_dim: int,
        block_size: int,
        dtype: str = "bf16",
    ) -> None: ...
    def attention(
        self,
        q: NDArray[numpy.float32],
        out: NDArray[numpy.float32],
        k_cache: NDArray[numpy.uint8],
        v_cache: NDArray[numpy.uint8],
        block_table: NDArray[numpy.int32],
        cu_seqlens_q: NDArray[numpy.int32],
        seq_lens: NDArray[numpy.int32],
        head_dim: int,
        block_size: int,
        dtype: str,
        scale: float,
        window: int,
        softcap: float,
        items: NDArray[numpy.int32],
        partition: int = 256,
    ) -> None: ...
    def embed(
        self, rows: NDArray[numpy.uint8], type: int, k: int, ids: NDArray[numpy.int32], scale: float = 1.0
    ) -> object: ...
    def softcap(self, x: NDArray[numpy.float32], cap: float) -> None: ...
    def gate(
        self, gate: NDArray[numpy.float32], up: NDArray[numpy.float32], out: NDArray[numpy.float32], epilogue: int
    ) -> None: ...
    def sample(self, logits: NDArray[numpy.float32], batch: object, max_logprobs: int) -> tuple[Any, ...]: ...

PACK_VERSION: int = 1

class Pool:
    """Worker threads; the caller is worker 0."""

    def __init__(self, threads: int, spin: bool) -> None: ...
    @property
    def threads(self) -> int: ...

class Arena:
    """Where weights lie one after another, in huge pages."""

    def __init__(self) -> None: ...

def new_weight(isa: str, arena: Arena, type: int, n: int, k: int, interleave: bool = False) -> Weight:
    """
    Room for n rows of k inputs (n gate and n up rows, with interleave); `pack` or `read_sections` fills it.
    """

def pack(
    pool: Pool, weight: Weight, rows: NDArray[numpy.uint8], type: int, up: NDArray[numpy.uint8] | None = None
) -> None:
    """Packs rows as stored into `weight`, over all workers."""

def packed_bytes(type: int, n: int, k: int) -> int:
    """Bytes of a packed matrix of n rows and k inputs; -1: not possible."""

def read_sections(
    pool: Pool, fd: int, targets: Sequence[NDArray[numpy.uint8]], offsets: Sequence[int], sums: Sequence[Sequence[int]]
) -> list[bool]:
    """
    Fills each array from the file at its offset, over all workers. False where the checksums do not fit.
    """

def checksums(data: NDArray[numpy.uint8]) -> list[int]:
    """Checksum of each MiB, as `read_sections` wants them."""

def measure_peak(pool: Pool, isa: str, kind: str) -> float:
    """
    What all workers reach at most: bytes a second read from memory (kind "read"), or operations a second
    ("int8", "bf16", "fp32"; 0.0 where the instruction set has no such product). Raises ValueError.
    """

def measure_line_ns() -> float:
    """
    Nanoseconds until a core sees what another one wrote; 0.0 where two threads never run at the same time. On virtual
    machines it changes whenever the host moves a processor.
    """

class RecordInfo:
    """What a record of a tape is and does; counts are of one row."""

    @property
    def kind(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def phase(self) -> int: ...
    @property
    def output_rows(self) -> bool: ...
    @property
    def group(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def row_ops(self) -> int: ...
    @property
    def weight(self) -> str: ...

class Masking:
    """Scale, softcap (0: none) and window (0: none) of an attention."""

    def __init__(self, scale: float, softcap: float, window: int) -> None: ...

class Tape:
    """A lowered model: records that every worker walks once per step."""

    def __init__(self, isa: str, pool: Pool, *, vocab: int, hidden: int, max_tokens: int, max_rows: int) -> None: ...
    def label(self, name: str) -> None: ...
    def embed(self, rows: NDArray[numpy.uint8], type: int, k: int, scale: float, out: Matrix) -> None: ...
    def angles(self, inv_freq: Sequence[float], scale: float, out: Matrix) -> None: ...
    def norm_quant(
        self, x: Matrix, gain: NDArray[numpy.float32] | None, eps: float, out: Activations, output_rows: bool = False
    ) -> None: ...
    def norm_rows(
        self, x: Matrix, gain: NDArray[numpy.float32], eps: float, out: Matrix, add: bool, output_rows: bool = False
    ) -> None: ...
    def head_norm_rope(
        self, x: Matrix, head_dim: int, gain: NDArray[numpy.float32] | None, eps: float, angles: Matrix
    ) -> None: ...
    def kv_write(self, k: Matrix, v: Matrix, cache: KVCache, group: int, layer: int) -> None: ...
    def gate(self, gate: Matrix, up: Matrix, epilogue: int) -> None: ...
    def gemm(
        self,
        w: Weight,
        a: Activations,
        out: Matrix,
        bias: NDArray[numpy.float32] | None = None,
        epilogue: int = 0,
        output_rows: bool = False,
        joins: bool = False,
    ) -> None: ...
    def attention(self, q: Matrix, out: Matrix, cache: KVCache, group: int, layer: int, masking: Masking) -> None: ...
    def check_finite(self, arg: Matrix, /) -> None: ...
    def select(self, x: Matrix, out: Matrix) -> None: ...
    def softcap(self, arg0: Matrix, arg1: float, /) -> None: ...
    def sample(self, arg: Matrix, /) -> None: ...
    def run(
        self, caches: Sequence[KVCache], batch: object, previous_rows: NDArray[numpy.int32], mask_bits: object | None
    ) -> tuple[Any, ...]:
        """
        One step: (ids of all rows [R], -1 where none was chosen; token_ids [N], cu_tokens [S + 1], num_accepted [S],
        logprobs [R, 1 + K], top_ids [R, K], signals [R, 4], status [S], nanoseconds per label). Raises ValueError or
        TypeError naming the array that is wrong.
        """

    @property
    def profiling(self) -> bool:
        """Whether each record's time is kept."""

    @profiling.setter
    def profiling(self, arg: bool, /) -> None: ...
    def record_ns(self) -> list[int]:
        """
        Of the last step, per record, summed over the workers; [] when not profiling.
        """

    def phase_ns(self) -> list[int]:
        """Of the last step, per phase."""

    def records(self) -> list[RecordInfo]: ...
    @property
    def labels(self) -> list[str]: ...
    @property
    def num_records(self) -> int: ...
    @property
    def num_phases(self) -> int: ...
