"""From a Config to a running engine: model file, graph, sizes, backend, scheduler. The only place that assembles them.

It runs in the engine process (or in place, for `LLM`). Imports that only one backend needs stand in the function that
needs them: they decide how fast an engine starts.
"""

import platform
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import headrace
from headrace.backend.base import Backend, BackendSpec
from headrace.base.clock import Clock
from headrace.base.config import Config, pack_folder
from headrace.base.errors import ModelTooLargeError
from headrace.core.events import EventRecorder
from headrace.core.kv_cache import KVCacheManager
from headrace.core.kv_group import KVDtype, KVGroup
from headrace.core.scheduler import Scheduler, StepLimits
from headrace.engine.engine import Engine
from headrace.engine.memory import available_memory, show_bytes
from headrace.engine.messages import Ready
from headrace.engine.model_path import Report
from headrace.engine.sizing import Demand, Sizes, size_kv

if TYPE_CHECKING:
    from headrace.model.config import ModelConfig
    from headrace.model.graph import Graph
    from headrace.model.planner import ModelSize

_MIN_ROWS = 64  # output rows of a step: prompt logprobs ask for more than one per sequence


@dataclass(frozen=True, slots=True)
class Launched:
    engine: Engine
    recorder: EventRecorder
    ready: Ready
    identity: str  # of model, machine and settings: what a measured speed belongs to


def preload(backend: str) -> None:
    """Imports what `launch` will import, while there is nothing else to do."""
    if backend == "cpu":
        for name in ("backend.cpu", "backend.pack_cache", "model.checkpoint", "model.decoder"):
            import_module(f"headrace.{name}")


def launch(config: Config, path: Path, epoch: int, clock: Clock, report: Report) -> Launched:
    """Loads the model and gives an engine that is ready for its first message.

    Raises ModelFileError, ModelTooLargeError or ConfigError.
    """
    built = _fake(config) if config.backend == "fake" else _cpu(config, path, clock, report)
    backend, sizes = built.backend, built.sizes
    spec = backend.spec
    limits = StepLimits(
        spec.max_seqs, spec.max_tokens, spec.max_rows, min(spec.max_model_len, sizes.max_model_len), spec.vocab_size
    )
    kv = KVCacheManager(spec.kv_groups, spec.num_blocks, spec.block_size, config.enable_prefix_caching, spec.kv_dtype)
    recorder = EventRecorder("engine", epoch)
    scheduler = Scheduler(limits, kv, recorder)
    ready = Ready(
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        num_kv_tokens=sizes.num_kv_tokens,
        block_size=spec.block_size,
        vocab_size=spec.vocab_size,
        summary={**built.summary, **size_summary(config, sizes, scheduler.max_num_seqs)},
        num_blocks=sum(spec.num_blocks),
        kv_dtype=spec.kv_dtype,
        kv_bytes=sizes.kv_bytes,
    )
    return Launched(Engine(scheduler, backend, clock), recorder, ready, built.identity)


@dataclass(frozen=True, slots=True)
class _Built:
    backend: Backend
    sizes: Sizes
    summary: dict[str, str]
    identity: str


def _fake(config: Config) -> _Built:
    from headrace.engine import fake_model

    groups = fake_model.fake_groups()
    sizes = size_kv(groups, fake_model.MAX_POSITION, 0, available_memory(), _demand(config))
    backend = fake_model.fake_backend(_spec(config, groups, sizes, fake_model.VOCAB_SIZE))
    return _Built(backend, sizes, {"model": "none: a token oracle for tests (--backend fake)"}, "fake")


def _cpu(config: Config, path: Path, clock: Clock, report: Report) -> _Built:
    from headrace.backend.cpu import CpuBackend
    from headrace.backend.pack_cache import PackCache
    from headrace.model.checkpoint import open_checkpoint
    from headrace.model.decoder import build_graph
    from headrace.model.planner import measure_graph

    report("reading the model", 0.0)
    folder = pack_folder(config)
    # Before the model is opened: see PackCache.
    cache = PackCache(folder, path, config.pack_cache_bytes) if folder is not None and path.exists() else None
    checkpoint = open_checkpoint(path)
    try:
        model = checkpoint.config
        graph = build_graph(model, checkpoint)
        size = measure_graph(graph)
        sizes = plan_memory(config, model, graph)
        backend = CpuBackend(
            graph,
            checkpoint,
            _spec(config, graph.kv_groups, sizes, model.vocab_size),
            threads=config.threads,
            isa=config.isa,
            progress=lambda fraction: report("packing the weights", fraction),
            clock=clock,
            cache=cache,
        )
    except MemoryError as error:
        raise ModelTooLargeError(
            "memory ran out while the model was loaded: give it more, or less KV cache with --kv-cache-memory-bytes"
        ) from error
    finally:
        checkpoint.close()
    summary = {
        "model": f"{model.name} ({model.family}, {size.parameters / 1e6:,.0f} M parameters) from {path}",
        "weights": f"{show_bytes(size.weight_bytes)}: {_formats(size)}",
        "threads": f"{backend.threads} ({'--threads' if config.threads else 'affinity, CPU quota and physical cores'})",
        "kernels": f"{backend.isa} ({'--isa' if config.isa != 'auto' else 'the best that this machine runs'})",
    }
    processor = _processor()
    numbers = f"{size.weight_bytes} bytes, {kv_dtype(config)} KV cache"
    identity = f"{model.name}, {numbers}, {backend.isa}, {backend.threads} threads, {processor}"
    return _Built(backend, sizes, summary, f"{identity}, {headrace.__version__}")


def plan_memory(config: Config, model: "ModelConfig", graph: "Graph") -> Sizes:
    """The KV cache that this model gets on this machine now. Raises ModelTooLargeError or ConfigError."""
    from headrace.backend.lower import packed_bytes

    fixed = packed_bytes(graph) + _buffer_bytes(config, model)
    return size_kv(graph.kv_groups, model.max_position, fixed, available_memory(), _demand(config))


def _buffer_bytes(config: Config, model: "ModelConfig") -> int:
    """Activations of the largest step, and its logits."""
    widths = 8 * model.hidden_size + 3 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    return 4 * (_max_rows(config) * model.vocab_size + config.max_num_batched_tokens * widths)


def _formats(size: "ModelSize") -> str:
    """The storage formats, the largest first, leaving out the crumbs."""
    found = sorted(size.bytes_by_format.items(), key=lambda item: -item[1])
    return ", ".join(f"{show_bytes(count)} {name}" for name, count in found if count * 100 >= size.weight_bytes)


def _processor() -> str:
    """The model name that the kernel reports, or what little the standard library knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _demand(config: Config) -> Demand:
    return Demand(
        config.max_model_len,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.kv_cache_memory_bytes,
        config.block_size,
        kv_dtype(config),
    )


def kv_dtype(config: Config) -> KVDtype:
    """What the KV cache holds."""
    return "int8" if config.kv_cache_dtype == "int8" else "bf16"


def _max_rows(config: Config) -> int:
    return min(config.max_num_batched_tokens, max(config.max_num_seqs, _MIN_ROWS))


def _spec(config: Config, groups: tuple[KVGroup, ...], sizes: Sizes, vocab_size: int) -> BackendSpec:
    return BackendSpec(
        kv_groups=groups,
        num_blocks=sizes.num_blocks,
        block_size=config.block_size,
        vocab_size=vocab_size,
        max_tokens=config.max_num_batched_tokens,
        max_rows=_max_rows(config),
        max_seqs=config.max_num_seqs,
        max_model_len=sizes.max_model_len,
        kv_dtype=kv_dtype(config),
    )


def size_summary(config: Config, sizes: Sizes, max_num_seqs: int) -> dict[str, str]:
    """What was chosen for memory and why, for people."""
    size = f"{show_bytes(sizes.kv_bytes)} of {kv_dtype(config)}"
    held = f"{size} for {sizes.num_kv_tokens:,} tokens in blocks of {config.block_size}"
    reuse = "equal prefixes are reused" if config.enable_prefix_caching else "no prefix reuse"
    return {
        "KV cache": f"{held}; {reuse} ({sizes.kv_reason})",
        "context": f"{sizes.max_model_len:,} tokens ({sizes.context_reason})",
        "step": f"up to {max_num_seqs} sequences and {config.max_num_batched_tokens} tokens",
    }
