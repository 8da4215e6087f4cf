"""The vocabularies in tests/data/vocabs, their corpus and the ids that llama.cpp gives for it."""

import gzip
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from headrace.model.gguf import GGUFFile
from headrace.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "vocabs"
PUBLISHED = ("bert-bge", "deepseek-coder", "gpt-2", "llama-spm", "phi-3")
EVERY = (*PUBLISHED, "smollm2", "gemma3")


def read_json(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


@cache
def corpus() -> list[str]:
    return list(json.loads((DATA / "corpus.json").read_text(encoding="utf-8")))


@cache
def expected(name: str) -> dict[str, list[list[int]]]:
    return dict(read_json(DATA / "expected" / f"{name}.json.gz"))


@cache
def metadata(name: str) -> dict[str, Any]:
    """As the GGUF reader gives it; for gemma3 with placeholders for the tokens that the excerpt leaves out."""
    if name == "gemma3":
        return _gemma3()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / f"{name}.gguf"
        plain.write_bytes(gzip.decompress((DATA / f"{name}.gguf.gz").read_bytes()))
        return dict(GGUFFile(plain).metadata)


@cache
def tokenizer(name: str, pre: str = "") -> Tokenizer:
    return Tokenizer.from_gguf(metadata(name) | ({"tokenizer.ggml.pre": pre} if pre else {}), name)


def _gemma3() -> dict[str, Any]:
    excerpt = read_json(DATA / "gemma3.json.gz")
    size = excerpt["size"]
    tokens, types, scores = [f"[left out {i}]" for i in range(size)], [5] * size, [-1e9] * size
    for token_id, (text, kind, score) in excerpt["tokens"].items():
        tokens[int(token_id)], types[int(token_id)], scores[int(token_id)] = text, kind, score
    arrays = {"tokens": tokens, "token_type": types, "scores": scores}
    return excerpt["metadata"] | {f"tokenizer.ggml.{name}": array for name, array in arrays.items()}
