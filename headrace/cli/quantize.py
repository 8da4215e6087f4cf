"""`headrace quantize SOURCE`: a GGUF file with the weights in fewer bits, and a table of what they cost in quality."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.config import cache_dir, option
from headrace.cli.options import Command, Given, Positional, read
from headrace.cli.progress import ProgressLine
from headrace.cli.quality import encode_texts, read_texts, table

if TYPE_CHECKING:
    from headrace.bench.quality import Comparison
    from headrace.model.calibrate import CalibratingExecutor
    from headrace.model.checkpoint import FileCheckpoint
    from headrace.model.gguf_export import Target
    from headrace.model.graph import Graph

FORMATS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16", "f32")


@dataclass(frozen=True)
class QuantizeOptions:
    """What to write, and how much of its quality to measure."""

    format: str = option("q8_0", "Format of the layers' matrices.", choices=FORMATS)
    head_format: str = option(
        "auto",
        "Format of embedding and head; auto: q8_0, because they are the most sensitive, or a float --format.",
        choices=("auto", *FORMATS),
    )
    output: str = option("", "File to write; empty: SOURCE.FORMAT.gguf in the current folder.", short="-o")
    force: bool = option(False, "Replace a file that exists.")
    quality: bool = option(True, "Measure what the new weights cost.")
    text: str = option("", "Text files to measure on, separated by commas; empty: the corpus that comes with headrace.")
    max_tokens: int = option(256, "Most tokens of each text; 0: all.", count=True, minimum=0)
    window: int = option(256, "Tokens that are read together.", count=True, minimum=8)
    calibration_tokens: int = option(
        256,
        "Tokens at the end of each text of the corpus, never measured on, that show which weights matter; 0: none, "
        "all errors weigh alike.",
        count=True,
        minimum=0,
    )


COMMAND = Command(
    "quantize",
    "Write a GGUF file, for headrace and for llama.cpp, with a model's weights in fewer bits, and measure what they "
    "cost: KL divergence and perplexity against the source in float32.",
    QuantizeOptions,
    (Positional("source", "Hugging Face folder, GGUF file of float weights, or hub id", required=True),),
    ("cache_dir", "isa", "threads", "kv_cache_dtype"),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    own, config = given.own, given.config
    from headrace.backend.threads import default_threads
    from headrace.model.checkpoint import open_checkpoint
    from headrace.model.fetch import resolve_model
    from headrace.model.gguf_export import check_target, export
    from headrace.text.gguf_tokenizer import gguf_keys

    corpus = read_texts("")
    texts = read_texts(own.text)
    with ProgressLine() as line:
        path = resolve_model(given.positionals["source"], cache_dir(config.cache_dir), line.report)
        source = open_checkpoint(path)
        try:
            target = _target(own, path, config.threads or default_threads())
            check_target(source, target)
            keys = source.metadata
            if source.format == "safetensors":
                keys = gguf_keys(path, source.config.vocab_size, {**corpus, **texts}.values())
            yardstick = _Yardstick(source, keys, given, line)
            learn = partial(yardstick.importance, corpus)
            export(source, target, keys, learn, partial(line.report, f"writing {own.format}"))
            written = open_checkpoint(target.path)
            try:
                line.clear()
                print(_summary(source, written), flush=True)
                rows = yardstick.measure(written, texts) if own.quality else {}
                line.clear()
                print("\n".join(table(rows, "against float32") if rows else ()), end="\n" if rows else "")
            finally:
                written.close()
        finally:
            source.close()
    return 0


def _target(own: QuantizeOptions, source: Path, threads: int) -> "Target":
    from headrace.model.gguf_export import Target

    head = own.head_format
    if head == "auto":
        head = "q8_0" if own.format.startswith("q") else own.format
    name = source.resolve().name.removesuffix(".gguf")
    path = Path(own.output or f"{name}.{own.format}.gguf").expanduser()
    return Target(path, own.format.upper(), head.upper(), own.force, threads)


def _summary(source: "FileCheckpoint", written: "FileCheckpoint") -> str:
    from headrace.model.decoder import build_graph
    from headrace.model.planner import measure_graph

    before = measure_graph(build_graph(source.config, source))
    after = measure_graph(build_graph(written.config, written))
    formats = ", ".join(f"{name} {count / 1e6:,.1f} MB" for name, count in sorted(after.bytes_by_format.items()))
    return (
        f"{written.path}: {written.path.stat().st_size / 1e6:,.1f} MB\n"
        f"weights: {after.weight_bytes / 1e6:,.1f} MB ({formats}), in the source {before.weight_bytes / 1e6:,.1f} MB; "
        f"{8 * after.weight_bytes / after.parameters:.2f} bits each"
    )


class _Yardstick:
    """The source in float32 on real text: it shows which weights matter, and afterwards what was lost.

    Where it does not fit into memory, errors weigh alike and nothing is measured, and that is said.
    """

    def __init__(
        self, source: "FileCheckpoint", keys: Mapping[str, Any], given: Given[QuantizeOptions], line: ProgressLine
    ) -> None:
        self._source, self._keys, self._given, self._line = source, keys, given, line

    @cached_property
    def _executor(self) -> "CalibratingExecutor | None":
        from headrace.model.calibrate import CalibratingExecutor
        from headrace.model.decoder import build_graph

        graph = build_graph(self._source.config, self._source)
        if self._fits("the source", graph, "errors weigh alike and quality is not measured"):
            return CalibratingExecutor(graph, self._source)
        return None

    @property
    def _calibrates(self) -> bool:
        return self._given.own.calibration_tokens > 0 and self._given.own.format.startswith("q")

    def _fits(self, what: str, graph: "Graph", consequence: str) -> bool:
        from headrace.engine.memory import available_memory
        from headrace.model.planner import measure_graph

        needed, free = 4 * measure_graph(graph).parameters, available_memory().available
        if needed < free:
            return True
        self._line.clear()
        gigabytes = f"needs {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free"
        print(f"headrace quantize: {what} in float32 {gigabytes}: {consequence}", file=sys.stderr)
        return False

    def importance(self, corpus: Mapping[str, str]) -> dict[str, Any]:
        """Of the inputs of each matrix; empty where errors are to weigh alike."""
        own = self._given.own
        if not self._calibrates or self._executor is None:
            return {}
        self._executor.listening = True
        parts = self._windows(corpus, lambda ids: ids[-own.calibration_tokens :])
        for done, part in enumerate(parts):
            self._executor.logits(part, range(len(part) - 1))
            self._line.report("reading", done + 1, len(parts))
        self._executor.listening = False
        return self._executor.importance()

    def measure(self, written: "FileCheckpoint", texts: Mapping[str, str]) -> "dict[str, Comparison]":
        """What the new weights cost alone, and with the arithmetic and the KV cache of the server."""
        from headrace.bench.quality import BackendLogits, ExecutorLogits, compare
        from headrace.engine.launch import kv_dtype
        from headrace.model.decoder import build_graph
        from headrace.model.numpy_executor import NumpyExecutor

        own, config = self._given.own, self._given.config
        if self._executor is None:
            return {}
        # The ends of the corpus were shown to the encoder.
        seen = own.calibration_tokens if self._calibrates and not own.text else 0
        parts = self._windows(texts, lambda ids: ids[: len(ids) - seen][: own.max_tokens or None])
        candidates: dict[str, BackendLogits | ExecutorLogits] = {}
        graph = build_graph(written.config, written)
        if self._fits("the new model", graph, "it is measured as served only"):
            candidates["weights alone"] = ExecutorLogits(NumpyExecutor(graph, written, "float32"))
        candidates["as served"] = BackendLogits(written, own.window, config.threads, config.isa, kv_dtype(config))
        return {
            name: compare(self._executor, candidate, parts, partial(self._line.report, f"measuring {name}"))
            for name, candidate in candidates.items()
        }

    def _windows(self, texts: Mapping[str, str], cut: Callable[[list[int]], list[int]]) -> list[list[int]]:
        from headrace.bench.quality import windows

        encoded = encode_texts(Path("SOURCE"), "gguf", self._keys, texts, 0)
        return [part for prefix, ids in encoded.values() for part in windows(cut(ids), self._given.own.window, prefix)]
