"""Writes a checkpoint as a GGUF file, its matrices in a block format: what `headrace quantize` does.

    checkpoint -> graph (is it sound?) -> metadata and directory -> read back: the same graph? -> tensors, one by one

Everything that could refuse a model comes before the first tensor is encoded. Text is another room's: the caller gives
the `tokenizer.*` keys of a folder; a GGUF file's own metadata is carried over.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import ExportError, ModelFileError
from headrace.model.checkpoint import FileCheckpoint, interleaved_rows, open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.encode import encode
from headrace.model.formats import FORMATS
from headrace.model.gguf_config import SAMPLING_KEYS, metadata_of_config
from headrace.model.gguf_writer import GGUFWriter, check_path
from headrace.model.graph import Graph, Op, WeightRef
from headrace.model.quantize import dequantize
from headrace.model.rope import rope_divisors

HEADS = ("token_embd.weight", "output.weight")
_ROPE = "rope_freqs.weight"
_PART = 1 << 22  # values that are read, encoded and written together
# general.file_type: the format of most matrices
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
_REPLACED = ("general.file_type", "general.quantization_version", "general.alignment")


@dataclass(frozen=True, slots=True)
class Target:
    """What to write. Formats are keys of model.encode's; `head_format` is that of embedding and head."""

    path: Path
    format: str
    head_format: str
    force: bool = False
    threads: int = 1


def export(
    checkpoint: FileCheckpoint,
    target: Target,
    tokenizer: Mapping[str, Any],
    importance: Callable[[], Mapping[str, npt.NDArray[np.float32]]],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes target.path whole or not at all. `tokenizer`: the keys for a folder; a GGUF source brings its own.
    `importance` gives, once nothing can be refused any more, that of each matrix's inputs by tensor name; a matrix that
    it lacks has its errors weighted alike.

    `progress` hears (bytes of tensors written, bytes in all). Raises ModelFileError for a model that is unsupported or
    already quantised, ExportError for one that GGUF cannot express and for a file that cannot be written.
    """
    check_target(checkpoint, target)
    graph = build_graph(checkpoint.config, checkpoint)
    refs = {ref.name: ref for op in graph.ops for ref in (*op.weights, *([op.bias] if op.bias else []))}
    shapes = {name: checkpoint.weight(refs[name]).shape for name in checkpoint.names()}
    formats = {name: _format(checkpoint, refs[name], shape, target) for name, shape in shapes.items()}
    tensors = {name: (formats[name], shape) for name, shape in shapes.items()}
    divisors = rope_divisors(checkpoint.config)
    if divisors:
        tensors[_ROPE] = ("F32", (len(divisors),))
    with GGUFWriter(target.path, _metadata(checkpoint, target, tokenizer), tensors, target.force) as writer:
        if divisors:
            writer.append(_ROPE, np.asarray(divisors, np.float32).view(np.uint8))
        _check_same(checkpoint, graph, writer.temporary)
        weights = importance()
        total = sum(FORMATS[fmt].row_bytes(int(np.prod(shape))) for fmt, shape in tensors.values())
        done = 0
        for name in shapes:
            for part in _parts(checkpoint, refs[name], formats[name], weights.get(name), target.threads):
                writer.append(name, part)
                done += part.nbytes
                if progress is not None:
                    progress(done, total)
        writer.commit()


def check_target(checkpoint: FileCheckpoint, target: Target) -> None:
    """Raises ExportError for a path that cannot be written to, before any work is done for it."""
    path = target.path
    if path.exists() and path.samefile(checkpoint.path):
        raise ExportError(f"{path} is the source itself; write to another name with --output")
    check_path(path, target.force)


def _format(checkpoint: FileCheckpoint, ref: WeightRef, shape: tuple[int, ...], target: Target) -> str:
    """Vectors stay exact; rows that are no whole blocks stay floats."""
    if len(shape) == 1:
        return "F32"
    wanted = target.head_format if ref.name in HEADS else target.format
    if FORMATS[wanted].block_size == 1:
        return wanted
    if FORMATS[ref.quant].block_size != 1:
        problem = f"is already stored as {ref.quant}; quantising twice loses twice: start from the float weights"
        raise ModelFileError(checkpoint.path, ref.name, problem)
    return wanted if shape[-1] % FORMATS[wanted].block_size == 0 else ref.quant


def _metadata(checkpoint: FileCheckpoint, target: Target, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    if checkpoint.format == "gguf":
        values = {key: value for key, value in checkpoint.metadata.items() if key not in _REPLACED}
    else:
        declared = checkpoint.metadata["generation_config"]
        values = metadata_of_config(checkpoint.config) | dict(tokenizer)
        for key, name in SAMPLING_KEYS.items():
            value = declared.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values[key] = int(value) if name == "top_k" else float(value)
    return values | {"general.file_type": _FILE_TYPES[target.format], "general.quantization_version": 2}


def _check_same(checkpoint: FileCheckpoint, graph: Graph, written: Path) -> None:
    """The file as it will be read must be the model that was given. Raises ExportError with the first difference."""
    copy = open_checkpoint(written)
    try:
        found = build_graph(copy.config, copy)
        pairs: list[tuple[str, Any, Any]] = [
            ("context length", checkpoint.config.max_position, copy.config.max_position)
        ]
        for op, other in zip(graph.ops, found.ops, strict=True):
            pairs += [(f"{op.output}, {key}", a, b) for key, a, b in _facts(op, other)]
    finally:
        copy.close()
    for what, ours, theirs in pairs:
        if not _close(ours, theirs):
            raise ExportError(
                f"{checkpoint.path}: a GGUF file cannot express this {checkpoint.config.family} model: {what} "
                f"would be {theirs!r:.60} instead of {ours!r:.60}"
            )


def _facts(ours: Op, theirs: Op) -> Iterator[tuple[str, Any, Any]]:
    yield "operation", (ours.kind, ours.inputs), (theirs.kind, theirs.inputs)
    yield "weights", [ref.name for ref in ours.weights], [ref.name for ref in theirs.weights]
    yield "bias", ours.bias and ours.bias.name, theirs.bias and theirs.bias.name
    for key, value in ours.attrs.items():
        yield key, value, theirs.attrs[key]


def _close(a: Any, b: Any) -> bool:
    """Equal but for what storing numbers as float32 changes."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return isclose(a, b, rel_tol=1e-5)
    return bool(a == b)


def _parts(
    checkpoint: FileCheckpoint, ref: WeightRef, fmt: str, importance: npt.NDArray[np.float32] | None, threads: int
) -> Iterator[npt.NDArray[np.uint8]]:
    """The tensor as it is stored in the file, some rows at a time."""
    weight, config = checkpoint.weight(ref), checkpoint.config
    data = weight.data
    part = ref.name.split(".")[2] if ref.name.startswith("blk.") else ""
    if config.family in ("llama", "mistral") and part in ("attn_q", "attn_k"):
        heads = config.num_heads if part == "attn_q" else config.num_kv_heads
        row_bytes = data.shape[1] if len(weight.shape) == 2 else 4
        data = interleaved_rows(data.reshape(-1, row_bytes), heads).reshape(data.shape)
    step = max(1, _PART // weight.shape[-1])
    for start in range(0, len(data), step):
        rows = data[start : start + step]
        if weight.format == fmt:
            yield rows
            continue
        values = dequantize(rows, weight.format)
        if not np.isfinite(values).all():
            raise ModelFileError(checkpoint.path, ref.name, "holds a value that is not finite: the file is corrupt")
        yield encode(values, fmt, importance, threads)
