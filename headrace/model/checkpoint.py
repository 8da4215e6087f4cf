"""What every checkpoint format gives: a config, weights by canonical name, and the sources of text handling.

Canonical names are GGUF's: token_embd.weight, output_norm.weight, output.weight and, for layer N,
blk.N.{attn_norm, attn_q, attn_k, attn_v, attn_q_norm, attn_k_norm, attn_output, post_attention_norm, ffn_norm,
ffn_gate, ffn_up, ffn_down, post_ffw_norm}.{weight, bias}. How a format departs from plain storage (permuted rope rows,
gains minus one) is known here and nowhere else: `Checkpoint.ref` puts it into the WeightRef.

Text sources: for a GGUF file `metadata` is its metadata (tokenizer.* keys); for a folder it is {"config": ...,
"generation_config": ...} (parsed JSON objects), and the tokenizer's files lie in the folder `path`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.base.errors import ModelFileError
from headrace.model.config import ModelConfig
from headrace.model.formats import FORMATS
from headrace.model.gguf import GGUFFile
from headrace.model.gguf_config import config_from_gguf
from headrace.model.graph import WeightRef
from headrace.model.hf_config import config_from_hf
from headrace.model.hf_folder import canonical_names, read_folder
from headrace.model.tensor_info import TensorInfo

if TYPE_CHECKING:  # imported where tensors are read: a server reads only metadata, and starts without NumPy
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor as stored, its transform already applied.

    `data` is uint8 [rows, row_bytes] (rows = 1 for 1-D), possibly a read-only memory map; `shape` is (out, in) or (n,).
    A 1-D tensor (gain, bias) always comes as F32, which is exact for every float format.
    """

    format: str  # "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"
    shape: tuple[int, ...]
    data: "npt.NDArray[np.uint8]"


class Checkpoint(Protocol):
    path: Path
    config: ModelConfig
    format: str  # "gguf" | "safetensors"
    metadata: dict[str, Any]

    def names(self) -> list[str]: ...
    def has(self, name: str) -> bool: ...
    def ref(self, name: str, shape: tuple[int, ...]) -> WeightRef:
        """The reference to a tensor that must exist with this shape; ModelFileError when it does not."""
        ...

    def weight(self, ref: WeightRef) -> Weight: ...
    def release_pages(self) -> None:
        """What was read of mapped files leaves this process; a later read brings it back."""
        ...

    def close(self) -> None: ...


class TensorFiles(Protocol):
    """What a container format gives: a directory of tensors and their bytes."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> "npt.NDArray[np.uint8]": ...
    def release_pages(self) -> None: ...
    def close(self) -> None: ...


class FileCheckpoint:
    """A Checkpoint over one container. `stored` maps canonical names to the container's own."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        files: TensorFiles,
        stored: dict[str, str],
        metadata: dict[str, Any],
    ) -> None:
        self.path = path
        self.config = config
        self.metadata = metadata
        self.format = "gguf" if isinstance(files, GGUFFile) else "safetensors"
        self._files = files
        self._stored = stored

    def names(self) -> list[str]:
        return list(self._stored)

    def has(self, name: str) -> bool:
        return name in self._stored

    def ref(self, name: str, shape: tuple[int, ...]) -> WeightRef:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelFileError(self.path, name, f"is missing; a {self.config.family} model needs it")
        info = self._files.tensors[stored]
        if info.shape != shape:
            problem = f"has shape {list(info.shape)}, the configuration asks for {list(shape)}"
            raise ModelFileError(self.path, stored, problem)
        if info.format not in FORMATS:
            problem = f"is stored as {info.format}; supported: {', '.join(FORMATS)}"
            raise ModelFileError(self.path, stored, problem)
        if len(shape) == 1 and FORMATS[info.format].block_size != 1:
            raise ModelFileError(self.path, stored, f"is a vector stored as {info.format}, not as a float format")
        return WeightRef(name, self._transform(name), info.format)

    def _transform(self, name: str) -> str:
        """llama.cpp's converter interleaves the rope pairs of q and k for the architecture "llama" only."""
        part = name.split(".")[2] if name.startswith("blk.") else name
        if self.format == "gguf" and self.config.family == "llama" and part in ("attn_q", "attn_k"):
            heads = self.config.num_heads if part == "attn_q" else self.config.num_kv_heads
            return f"rope_permute:{heads}"
        return "add_one" if self.config.norm_add_one and "norm" in part else ""

    def weight(self, ref: WeightRef) -> Weight:
        """The tensor of a reference that `ref` made. A permuted one is a copy, any other matrix a view of the file."""
        import numpy as np

        from headrace.model.quantize import dequantize

        info = self._files.tensors[self._stored[ref.name]]
        data, fmt = self._files.read(info.name), info.format
        if len(info.shape) == 1:
            values = dequantize(data, fmt)[0]
            if ref.transform == "add_one":
                values = values + np.float32(1)
            data, fmt = values.reshape(-1, 1).view(np.uint8), "F32"
        if ref.transform.startswith("rope_permute:"):
            data = half_split_rows(data, int(ref.transform.partition(":")[2]))
        if len(info.shape) == 1:
            data = data.reshape(1, -1)
        return Weight(fmt, info.shape, data)

    def release_pages(self) -> None:
        self._files.release_pages()

    def close(self) -> None:
        self._files.close()


def half_split_rows(data: "npt.NDArray[np.uint8]", heads: int) -> "npt.NDArray[np.uint8]":
    """Rows of `heads` heads from interleaved rope pairs (2i, 2i + 1) to half-split ones (i, i + d/2).

    `data` is [heads * d, row_bytes], any format: whole rows move, so nothing is rounded.
    """
    import numpy as np

    rows, row_bytes = data.shape
    pairs = data.reshape(heads, rows // heads // 2, 2, row_bytes)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, row_bytes)


def interleaved_rows(data: "npt.NDArray[np.uint8]", heads: int) -> "npt.NDArray[np.uint8]":
    """The inverse of half_split_rows: how llama.cpp's converter stores q and k of the architecture "llama"."""
    import numpy as np

    rows, row_bytes = data.shape
    halves = data.reshape(heads, 2, rows // heads // 2, row_bytes)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, row_bytes)


def open_checkpoint(path: Path) -> FileCheckpoint:
    """Open a GGUF file or a Hugging Face folder (config.json, safetensors).

    Reads headers only. Raises ModelFileError when the file is corrupt or the model is not supported.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelFileError(path, "path", "does not exist")
    file = GGUFFile(path)
    stored = {name: name for name in file.tensors if name != "rope_freqs.weight"}
    return FileCheckpoint(path, config_from_gguf(file), file, stored, file.metadata)


def _open_folder(path: Path) -> FileCheckpoint:
    folder = read_folder(path)
    config = config_from_hf(path, folder.config, folder.generation_config)
    metadata = {"config": folder.config, "generation_config": folder.generation_config}
    return FileCheckpoint(path, config, folder.weights, canonical_names(path, folder.weights, config), metadata)
