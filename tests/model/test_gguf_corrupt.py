"""Corrupt GGUF files: whatever is wrong, the answer is a ModelFileError that names the file and the field."""

import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import llama_metadata, llama_tensors, write_gguf

from headrace.base.errors import ModelFileError
from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.gguf import GGUFFile

HUGE = (1 << 63) + 7


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes = b"w", dims: tuple[int, ...] = (8, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    head: bytes = b"GGUF" + struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
    data: int = 256,
) -> bytes:
    """A GGUF file from its parts: (tensor count, pair count), records, padding to 32, `data` bytes."""
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    body = head + struct.pack("<QQ", tensor_count, pair_count) + b"".join(pairs) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


def swallowing_string() -> bytes:
    """An array of two strings whose first leaves four bytes of the file: too few for the second one's length."""
    file = build((pair(b"k", 9, struct.pack("<IQ", 8, 2)),))
    start = 24 + len(pair(b"k", 9, struct.pack("<IQ", 8, 2)))
    return file[:start] + struct.pack("<Q", len(file) - start - 8 - 4) + file[start + 8 :]


ALIGN = b"general.alignment"
CASES: dict[str, tuple[bytes, str, str]] = {
    "not gguf": (b"PK\x03\x04" + bytes(64), "header", "magic"),
    "three bytes": (b"GGU", "header", "magic"),
    "no version": (b"GGUF\x03", "version", "needs 4 bytes"),
    "version 1": (build(head=b"GGUF" + struct.pack("<I", 1)), "version", "versions 2 and 3"),
    "version 9": (build(head=b"GGUF" + struct.pack("<I", 9)), "version", "versions 2 and 3"),
    "big-endian": (build(head=b"GGUF" + struct.pack(">I", 3)), "version", "big-endian"),
    "absurd tensor count": (build(counts=(HUGE, 0)), "tensor_count", "more than the file can hold"),
    "absurd pair count": (build(counts=(0, HUGE)), "metadata_kv_count", "more than the file can hold"),
    "absurd key length": (build((struct.pack("<Q", HUGE),), counts=(0, 1)), "key of metadata pair 0", "needs"),
    "key not text": (build((pair(b"\xff\xfe", 4, bytes(4)),)), "key of metadata pair 0", "UTF-8"),
    "empty key": (build((pair(b"", 4, bytes(4)),)), "key of metadata pair 0", "is empty"),
    "empty tensor name": (build((), (tensor(name=b""),)), "name of tensor 0", "is empty"),
    "key twice": (build((pair(b"k", 4, bytes(4)),) * 2), "key of metadata pair 1", "twice"),
    "unknown value type": (build((pair(b"k", 77, bytes(8)),)), "k", "unknown value type 77"),
    "string past the end": (build((pair(b"k", 8, struct.pack("<Q", HUGE)),)), "k", "needs"),
    "string not text": (build((pair(b"k", 8, text(b"\xc3\x28")),)), "k", "UTF-8"),
    "bool of 2": (build((pair(b"k", 7, b"\x02"),)), "k", "neither 0 nor 1"),
    "array of arrays": (build((pair(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(16)),)), "k", "not supported"),
    "array of unknown": (build((pair(b"k", 9, struct.pack("<IQ", 50, 1) + bytes(16)),)), "k", "not supported"),
    "absurd number array": (build((pair(b"k", 9, struct.pack("<IQ", 10, HUGE)),)), "k", "needs"),
    "absurd string array": (build((pair(b"k", 9, struct.pack("<IQ", 8, HUGE)),)), "k", "more than the file can hold"),
    "string array past the end": (
        build((pair(b"k", 9, struct.pack("<IQ", 8, 2) + text(b"a") + struct.pack("<Q", HUGE)),)),
        "k",
        "string 1 of 2 runs past",
    ),
    "string array runs out": (swallowing_string(), "k", "string 1 of 2 runs past"),
    "alignment zero": (build((pair(ALIGN, 4, struct.pack("<I", 0)),)), "general.alignment", "power of two"),
    "alignment 24": (build((pair(ALIGN, 4, struct.pack("<I", 24)),)), "general.alignment", "power of two"),
    "alignment huge": (build((pair(ALIGN, 4, struct.pack("<I", 1 << 31)),)), "general.alignment", "power of two"),
    "alignment text": (build((pair(ALIGN, 8, text(b"32")),)), "general.alignment", "power of two"),
    "tensor name twice": (build((), (tensor(), tensor(offset=64))), "name of tensor 1", "twice"),
    "no dimensions": (build((), (tensor(dims=()),), data=512), "w", "0 dimensions"),
    "many dimensions": (build((), (tensor(dims=(2,) * 9),)), "w", "9 dimensions"),
    "empty dimension": (build((), (tensor(dims=(8, 0)),)), "w", "empty dimension"),
    "absurd dimension": (build((), (tensor(dims=(8, HUGE)),)), "w", "past the end"),
    "dimensions that wrap": (build((), (tensor(dims=(1 << 32, 1 << 32)),)), "w", "past the end"),
    "refused type": (build((), (tensor(kind=10),)), "w", "Q2_K"),
    "unknown type": (build((), (tensor(kind=999),)), "w", "999 (unknown)"),
    "part of a block": (build((), (tensor(dims=(40, 2), kind=8),)), "w", "not whole Q8_0 blocks"),
    "offset past the end": (build((), (tensor(offset=1 << 20),)), "w", "past the end"),
    "absurd offset": (build((), (tensor(offset=(1 << 64) - 32),)), "w", "past the end"),
    "offset not aligned": (build((), (tensor(offset=4),)), "w", "multiple of 32"),
    "overlapping tensors": (build((), (tensor(), tensor(b"v", offset=32))), "v", "overlap"),
    "directory past the end": (build((), (tensor(),), data=0)[:60], "w", "needs"),
    "truncated data": (build((), (tensor(dims=(8, 8)),), data=255), "w", "truncated"),
}


def test_the_sound_file_that_the_cases_break_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build((pair(b"k", 4, bytes(4)),), (tensor(), tensor(b"v", offset=64))))
    assert set(GGUFFile(path).tensors) == {"w", "v"}


@pytest.mark.parametrize("case", CASES)
def test_corrupt_file_names_itself_and_the_field(tmp_path: Path, case: str) -> None:
    data, field, words = CASES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field == field
    assert words in caught.value.problem
    assert str(path) in str(caught.value)
    assert peak < 1 << 20  # a claim in the file never becomes an allocation


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="no regular file"):
        GGUFFile(tmp_path / "pipe.gguf")


def read_everything(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for op in build_graph(checkpoint.config, checkpoint).ops:
        for ref in op.weights:
            checkpoint.weight(ref)
    list(checkpoint.metadata.get("tokenizer.ggml.tokens", ()))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    write_gguf(path, "llama", llama_metadata(), llama_tensors())
    read_everything(path)
    return path.read_bytes()


def survives(path: Path, data: bytes) -> None:
    """Reading either works or raises ModelFileError; anything else fails the test."""
    path.write_bytes(data)
    try:
        read_everything(path)
    except ModelFileError as error:
        assert str(path) in str(error)
        assert error.field


quick = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(draw=st.data())
def test_flipped_bytes(draw: st.DataObject, sound: bytes, tmp_path: Path) -> None:
    header = sound.index(b"blk.0.ffn_down") + 80
    data = bytearray(sound)
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(0, header))] = draw.draw(st.integers(0, 255))
    survives(tmp_path / "m.gguf", bytes(data))


@quick
@given(draw=st.data())
def test_words_replaced_by_extreme_counts(draw: st.DataObject, sound: bytes, tmp_path: Path) -> None:
    header = sound.index(b"blk.0.ffn_down") + 80
    at = draw.draw(st.integers(4, header))
    value = draw.draw(st.sampled_from([0, 1, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1]))
    survives(tmp_path / "m.gguf", sound[:at] + struct.pack("<Q", value) + sound[at + 8 :])


@quick
@given(draw=st.data())
def test_cut_anywhere(draw: st.DataObject, sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(sound[: draw.draw(st.integers(0, len(sound) - 64))])
    with pytest.raises(ModelFileError):
        read_everything(path)


WRONG_MODELS: dict[str, tuple[dict[str, object], str, str]] = {
    "architecture": ({}, "general.architecture", "supported: llama, qwen2, qwen3, gemma3"),
    "missing": ({"llama__block_count": None}, "llama.block_count", "is missing"),
    "text for a number": ({"llama__block_count": "one"}, "llama.block_count", "is a str, not a int"),
    "no layers": ({"llama__block_count": 0}, "num_layers", "not in 1.."),
    "absurd layers": ({"llama__block_count": 1 << 31}, "num_layers", "not in 1.."),
    "no heads": ({"llama__attention__head_count": 0}, "llama.attention.head_count", "is 0"),
    "heads per layer": ({"llama__attention__head_count": [2, 1]}, "llama.attention.head_count", "layer to layer"),
    "kv heads": ({"llama__attention__head_count_kv": 3}, "num_kv_heads", "does not divide"),
    "odd head": ({"llama__attention__key_length": 7}, "head_dim", "even"),
    "value length": ({"llama__attention__value_length": 4}, "llama.attention.value_length", "differs"),
    "partial rotary": ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count", "rotates a part"),
    "experts": ({"llama__expert_count": 8}, "llama.expert_count", "mixture-of-experts"),
    "eps": ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps", "not between"),
    "base": ({"llama__rope__freq_base": 0.0}, "rope_base", "not between"),
    "scaling kind": ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type", "not supported"),
    "scaling factor": (
        {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": -1.0},
        "rope_scaling.factor",
        "sensible",
    ),
    "eos": ({"tokenizer__ggml__eos_token_id": 6}, "tokenizer.ggml.eos_token_id", "outside the vocabulary"),
    "tokens a number": ({"tokenizer__ggml__tokens": 7}, "tokenizer.ggml.tokens", "not an array of strings"),
    "tokens numbers": ({"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens", "not an array of strings"),
    "one part of three": ({"split__count": 3}, "split.count", "llama-gguf-split --merge"),
    "too many tokens": ({"tokenizer__ggml__tokens": list("abcdefg")}, "tokenizer.ggml.tokens", "7 tokens"),
    "hidden size": ({"llama__embedding_length": 32}, "token_embd.weight", "asks for [6, 32]"),
    "more layers than tensors": ({"llama__block_count": 2}, "blk.1.attn_norm.weight", "is missing"),
}


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_sound_container_of_a_wrong_model(tmp_path: Path, case: str) -> None:
    changes, field, words = WRONG_MODELS[case]
    arch = "mamba" if case == "architecture" else "llama"
    path = write_gguf(tmp_path / "m.gguf", arch, llama_metadata(**changes), llama_tensors())
    with pytest.raises(ModelFileError) as caught:
        read_everything(path)
    assert caught.value.field == field
    assert words in caught.value.problem


def test_tensors_that_do_not_belong(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["blk.0.ffn_gate_inp.weight"] = tensors["blk.0.ffn_norm.weight"]
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), tensors)
    with pytest.raises(ModelFileError, match=r"blk.0.ffn_gate_inp.weight: is not a tensor of a llama model"):
        read_everything(path)


@pytest.mark.parametrize("divisors", [[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, float("nan"), 1.0], [1.0, 1.0]])
def test_bad_rope_divisors(tmp_path: Path, divisors: list[float]) -> None:
    tensors = llama_tensors() | {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), tensors)
    with pytest.raises(ModelFileError, match="rope_freqs"):
        read_everything(path)
