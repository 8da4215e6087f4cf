"""`headrace quality MODEL`: KL divergence and perplexity of the served arithmetic against float32, as a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.config import cache_dir, option
from headrace.base.errors import ConfigError
from headrace.cli.options import Command, Positional, read
from headrace.cli.progress import ProgressLine

if TYPE_CHECKING:
    from headrace.bench.quality import Comparison


@dataclass(frozen=True)
class QualityOptions:
    """What to compare, and on what."""

    reference: str = option("", "Compare with the float32 arithmetic of this model's weights; empty: of MODEL's own.")
    text: str = option("", "Text files, separated by commas; empty: the corpus that comes with headrace.")
    max_tokens: int = option(0, "Most tokens of each text; 0: all.", count=True, minimum=0)
    window: int = option(512, "Tokens that are read together.", count=True, minimum=8)


COMMAND = Command(
    "quality",
    "Measure what the served arithmetic costs: KL divergence and perplexity against float32. "
    "Exit status 1 when mean KL reaches 0.002 or perplexity differs by 0.3 %.",
    QualityOptions,
    (Positional("model", "catalog name, path or hub id; smollm2-135m when absent"),),
    ("model", "cache_dir", "isa", "threads", "kv_cache_dtype"),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    own, config = given.own, given.config
    from headrace.bench.quality import BackendLogits, QualityError, compare, join, windows
    from headrace.engine.launch import kv_dtype
    from headrace.model.checkpoint import open_checkpoint
    from headrace.model.decoder import build_graph
    from headrace.model.fetch import resolve_model
    from headrace.model.numpy_executor import NumpyExecutor

    texts = read_texts(own.text)
    found: dict[str, Comparison] = {}
    with ProgressLine() as line:
        path = resolve_model(config.model, cache_dir(config.cache_dir), line.report)
        exact = resolve_model(own.reference, cache_dir(config.cache_dir), line.report) if own.reference else path
        checkpoint, source = open_checkpoint(path), open_checkpoint(exact)
        try:
            if source.config.vocab_size != checkpoint.config.vocab_size:
                raise QualityError(f"{exact} and {path} have different vocabularies: they cannot be compared")
            encoded = encode_texts(path, checkpoint.format, checkpoint.metadata, texts, own.max_tokens)
            reference = NumpyExecutor(build_graph(source.config, source), source, "float32")
            candidate = BackendLogits(checkpoint, own.window, config.threads, config.isa, kv_dtype(config))
            for name, (prefix, ids) in encoded.items():
                parts = windows(ids, own.window, prefix)
                if parts:
                    found[name] = compare(reference, candidate, parts, partial(line.report, name))
        finally:
            checkpoint.close()
            source.close()
    whole = join(list(found.values()))
    print("\n".join(table({**found, "all": whole})))
    return 0 if whole.passes else 1


def read_texts(files: str) -> dict[str, str]:
    """Name -> text. Raises ConfigError for a file that cannot be read."""
    if files:
        paths = [Path(name.strip()).expanduser() for name in files.split(",")]
    else:
        paths = sorted((Path(__file__).parents[1] / "bench" / "corpus").glob("*.txt"))
    try:
        return {path.name: path.read_text(encoding="utf-8") for path in paths}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {error}") from error


def encode_texts(
    path: Path, kind: str, metadata: Mapping[str, object], texts: Mapping[str, str], most: int
) -> dict[str, tuple[list[int], list[int]]]:
    """Name -> (ids that begin every window, ids of the text)."""
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(metadata, path) if kind == "gguf" else Tokenizer.from_folder(path)
    prefix = [tokenizer.bos_token_id] if tokenizer.add_bos and tokenizer.bos_token_id is not None else []
    encoded = {}
    for name, text in texts.items():
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        encoded[name] = (prefix, ids[:most] if most else ids)
    return encoded


def table(rows: "Mapping[str, Comparison]", what: str = "text") -> Iterator[str]:
    """One line for each comparison, below a heading; `what` the names are."""
    width = max(len(name) for name in (what, *rows))
    yield f"{what:<{width}} {'tokens':>8} {'ppl f32':>9} {'ppl':>9} {'change':>9} {'mean KL':>9} {'same top':>9}"
    for name, row in rows.items():
        yield (
            f"{name:<{width}} {len(row.kl):>8,} {row.reference_perplexity:>9.3f} {row.perplexity:>9.3f}"
            f" {100 * row.perplexity_change:>+8.3f}% {row.mean_kl:>9.5f} {100 * row.agrees.mean():>8.2f}%"
        )
