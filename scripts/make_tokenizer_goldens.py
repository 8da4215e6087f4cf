"""Make tests/data/vocabs/expected: the token ids that llama.cpp gives for tests/data/vocabs/corpus.json.

    python scripts/make_tokenizer_goldens.py LLAMA_CPP_SOURCE [--smollm2 FILE.gguf] [--gemma3 FILE.gguf]

LLAMA_CPP_SOURCE is a source tree with static libraries built in build/. The ids come from llama.cpp alone, never from
Headrace. The vocabularies are those in tests/data/vocabs; the two models, which are not in the repository, also give
the vocabulary files smollm2.gguf.gz (whole) and gemma3.json.gz (only the pieces that the corpus can touch).
"""

import argparse
import gzip
import json
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gguf

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "vocabs"
VOCABS = ("bert-bge", "deepseek-coder", "gpt-2", "llama-spm", "phi-3")
# One name per pre-tokenizer; asked about with GPT-2's vocabulary, which can spell every byte.
PRETOKENIZERS = (
    "default", "llama-bpe", "dbrx", "glm4", "chatglm-bpe", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder",
    "deepseek-v3", "falcon", "mpt", "starcoder", "refact", "command-r", "smollm", "exaone", "tekken", "gpt-4o",
    "poro-chat", "viking", "bailingmoe", "seed-coder",
)  # fmt: skip


def build_oracle(source: Path, folder: Path) -> Path:
    program = folder / "tokenizer_oracle"
    libraries = ["src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a"]
    command = ["c++", "-O1", "-std=c++17", f"-I{source}/include", f"-I{source}/ggml/include"]
    command += [str(ROOT / "scripts" / "tokenizer_oracle.cpp"), "-o", str(program)]
    command += [str(source / "build" / library) for library in libraries]
    subprocess.run([*command, "-fopenmp", "-lpthread", "-ldl", "-lm"], check=True)
    return program


def ask(oracle: Path, model: Path, cases: Path, pre: str | None = None) -> dict[str, list[list[int]]]:
    """`plain`: no special tokens parsed or added; `special`: both."""
    answers = {}
    for name, flag in (("plain", "0"), ("special", "1")):
        command = [str(oracle), str(model), str(cases), flag, flag, *([pre] if pre else [])]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[:-1]
        answers[name] = [[int(token_id) for token_id in line.split()] for line in lines]
    return answers


def write_json(path: Path, value: Any) -> None:
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, mtime=0))


def write_vocab_only(model: Path, target: Path) -> None:
    """A GGUF file with the tokenizer's metadata and no tensors, compressed."""
    reader = gguf.GGUFReader(model)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "vocab.gguf"
        writer = gguf.GGUFWriter(plain, "llama")
        for name, field in reader.fields.items():
            if name.startswith("tokenizer.") or name in ("general.name", "general.license"):
                element = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        target.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))


def excerpt(model: Path, corpus: list[str]) -> dict[str, Any]:
    """The metadata of a SentencePiece-style file, with only those tokens that merging the corpus can touch.

    A merge makes substrings of the text only, so leaving out pieces that are no substring changes no id.
    """
    fields = gguf.GGUFReader(model).fields
    text = "\0".join(corpus).replace(" ", "▁") + "\0" + "\0".join(corpus)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    scores = fields["tokenizer.ggml.scores"].contents()
    kept = {
        i: [tokens[i], types[i], scores[i]] for i in range(len(tokens)) if types[i] in (2, 3, 6) or tokens[i] in text
    }
    kept = {i: entry for i, entry in kept.items() if not entry[0].startswith("<unused")}
    others = {
        name: field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.") and not isinstance(field.contents(), list)
    }
    return {"size": len(tokens), "tokens": kept, "metadata": others}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--gemma3", type=Path)
    arguments = parser.parse_args()
    corpus = json.loads((DATA / "corpus.json").read_text(encoding="utf-8"))
    (DATA / "expected").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        oracle = build_oracle(arguments.source, folder)
        cases = folder / "cases"
        encoded = [text.encode() for text in corpus]
        cases.write_bytes(b"".join(struct.pack("<I", len(text)) + text for text in encoded))
        models = {}
        for vocab in VOCABS:
            models[vocab] = folder / f"{vocab}.gguf"
            with gzip.open(DATA / f"{vocab}.gguf.gz") as packed, models[vocab].open("wb") as file:
                shutil.copyfileobj(packed, file)
        for vocab, model in models.items():
            write_json(DATA / "expected" / f"{vocab}.json.gz", ask(oracle, model, cases))
        answers = {pre: ask(oracle, models["gpt-2"], cases, pre)["special"] for pre in PRETOKENIZERS}
        write_json(DATA / "expected" / "pretokenizers.json.gz", answers)
        if arguments.smollm2:
            write_json(DATA / "expected" / "smollm2.json.gz", ask(oracle, arguments.smollm2, cases))
            write_vocab_only(arguments.smollm2, DATA / "smollm2.gguf.gz")
        if arguments.gemma3:
            write_json(DATA / "expected" / "gemma3.json.gz", ask(oracle, arguments.gemma3, cases))
            write_json(DATA / "gemma3.json.gz", excerpt(arguments.gemma3, corpus))


if __name__ == "__main__":
    main()
