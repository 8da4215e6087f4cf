"""What the machine's limits allow at best: bytes and operations of a work over the bandwidth and peaks measured.

Nothing overlaps: time is weights and KV read, plus matrix products at the peak of their kind, plus attention at the
bf16 (else fp32) peak. Norms, sampling and HTTP cost nothing here.
"""

from dataclasses import dataclass
from pathlib import Path

from headrace.model.checkpoint import open_checkpoint
from headrace.model.gguf import GGUFFile


@dataclass(frozen=True)
class Model:
    """Counts of a GGUF file. `body` and `head` are multiply-adds per token of the layers and of the output matrix."""

    weight_bytes: int
    body: int
    head: int
    kv_bytes: int  # per layer and token in a bf16 cache
    attention: int  # floating-point operations per layer, token and token attended to
    windows: tuple[int, ...]  # of each layer: the most tokens that it attends to
    floats: bool  # whether products run at the bf16 peak instead of the int8 one


def counted(path: Path) -> Model:
    """Raises ModelFileError when the file cannot be read."""
    file = GGUFFile(path)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    checkpoint.close()
    matrices = {name: info for name, info in file.tensors.items() if len(info.shape) == 2}
    size = sum(info.num_bytes for info in matrices.values())
    body = sum(info.shape[0] * info.shape[1] for name, info in matrices.items() if name.startswith("blk."))
    windowed = config.window_pattern or (bool(config.sliding_window),) * config.num_layers
    windows = tuple(config.sliding_window if limited else config.max_position for limited in windowed)
    floats = all(info.format in ("F32", "F16", "BF16") for info in matrices.values())
    file.close()
    return Model(
        size,
        body,
        config.vocab_size * config.hidden_size,
        4 * config.num_kv_heads * config.head_dim,
        4 * config.num_heads * config.head_dim,
        windows,
        floats,
    )


def floors(model: Model, limits: dict[str, float]) -> dict[tuple[str, str], float]:
    """By work and key of a measure. `limits` are those of machine.limits."""
    read = 1 / (limits["memory_gb_s"] * 1e9)
    flop = 1 / (limits.get("bf16_gflop_s", limits["fp32_gflop_s"]) * 1e9)
    product = 2 * (flop if model.floats else 1 / (limits.get("int8_gop_s", limits["fp32_gflop_s"]) * 1e9))

    def prompt(length: int) -> float:
        pairs = sum(sum(min(place, window) for place in range(1, length + 1)) for window in model.windows)
        return length * model.body * product + pairs * model.attention * flop

    def cached(context: int) -> int:
        return sum(min(context, window) for window in model.windows)

    def token(rows: int, context: int) -> float:
        attended = cached(context) * (model.kv_bytes * read + model.attention * flop)
        return model.weight_bytes * read / rows + (model.body + model.head) * product + attended

    found = {("ttft", "s"): prompt(2048) + model.head * product}
    for work, rows in (("streams16", 16), ("streams32", 32)):
        found[work, "tok_s"] = 1 / (token(rows, 192) + prompt(128) / 128)
    # One row reads memory all the time and has its products done meanwhile.
    found["single", "tok_s"] = 1 / ((model.weight_bytes + cached(96) * model.kv_bytes) * read)
    return found
