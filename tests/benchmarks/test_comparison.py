"""The side-by-side benchmark: what it keeps, what it chooses, and that its checkpoints hold the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from comparison.contestants import contestants
from comparison.floors import counted, floors
from comparison.folder import to_bf16, write_folder
from comparison.perplexity import windows
from comparison.report import report
from comparison.results import Result, ResultFile

from headrace.model.checkpoint import open_checkpoint
from headrace.model.gguf import GGUFFile
from headrace.model.quantize import dequantize
from tests.model.tiny_gguf import llama_metadata, llama_tensors, write_gguf

MODEL = "smollm2-135m"


def result(contestant: str, setting: str, repeat: int, value: float, work: str = "single", error: str = "") -> Result:
    values = {"perplexity" if work == "perplexity" else "tok_s": value}
    return Result(MODEL, contestant, setting, work, repeat, values, 0.01, {}, error)


def test_a_second_run_finds_what_the_first_measured_but_not_what_failed(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "new" / "results.jsonl")
    file.add(result("llama.cpp Q4_1", "-np 1", 0, 100.0))
    file.add(result("llama.cpp Q4_1", "-np 1", 1, 0.0, error="was not ready"))
    again = ResultFile(tmp_path / "new" / "results.jsonl")
    assert again.has((MODEL, "llama.cpp Q4_1", "-np 1", "single", 0))
    assert not again.has((MODEL, "llama.cpp Q4_1", "-np 1", "single", 1))
    again.add(result("llama.cpp Q4_1", "-np 1", 1, 90.0))
    assert ResultFile(tmp_path / "new" / "results.jsonl").has((MODEL, "llama.cpp Q4_1", "-np 1", "single", 1))


def test_the_best_setting_is_that_of_the_best_median_in_the_sweep(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.jsonl")
    for repeat, (first, second) in enumerate([(100, 110), (100, 120), (1000, 90)]):
        file.add(result("llama.cpp Q4_1", "one", repeat, first))
        file.add(result("llama.cpp Q4_1", "two", repeat, second))
    assert file.best_setting(MODEL, "llama.cpp Q4_1", "single", range(2)) == "two"
    assert file.best_setting(MODEL, "llama.cpp Q4_1", "ttft") is None


def test_ratios_tell_a_peer_of_equal_quality_from_one_that_answers_worse(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.jsonl")
    for name, speed, perplexity in (
        ("headrace Q4_1", 300, 12),
        ("llama.cpp Q4_1", 100, 12),
        ("llama.cpp Q4_0", 150, 13),
    ):
        file.add(result(name, "x", 0, speed))
        file.add(result(name, "x", 0, perplexity, work="perplexity"))
    rows = [
        line for line in report(file, [MODEL], tmp_path).splitlines() if line.startswith("| 1 stream, tok/s | Q4_1")
    ]
    assert rows == [
        "| 1 stream, tok/s | Q4_1: 300 | - | llama.cpp Q4_1: 100 (`x`) | 3.00x | llama.cpp Q4_0: 150 (`x`) | 2.00x |"
    ]


@pytest.mark.parametrize("model", ["smollm2-135m", "random-1b", "gemma3-270m"])
def test_every_setting_of_a_contestant_has_its_own_name(model: str, tmp_path: Path) -> None:
    for one in contestants(model, tmp_path, 2):
        names = [setting.name for setting in one.settings]
        assert len(set(names)) == len(names)
        assert "{port}" in one.command


def test_the_folder_holds_the_weights_of_the_gguf_file_in_bf16(tmp_path: Path) -> None:
    metadata = llama_metadata() | {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "smollm"}
    source = write_gguf(tmp_path / "tiny.gguf", "llama", metadata, llama_tensors())
    write_folder(source, tmp_path / "folder")
    given, made = open_checkpoint(source), open_checkpoint(tmp_path / "folder")
    assert sorted(given.names()) == sorted(made.names())
    file = GGUFFile(source)
    for name in given.names():
        shape = file.tensors[name].shape
        here, there = given.weight(given.ref(name, shape)), made.weight(made.ref(name, shape))
        expected = dequantize(here.data, here.format)
        rounded = (to_bf16(expected).astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(dequantize(there.data, there.format), rounded)
    vocabulary = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(6))


def test_windows_are_whole_and_begin_with_the_begin_token_where_there_is_one(tmp_path: Path) -> None:
    metadata = llama_metadata() | {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "smollm"}
    metadata |= {"tokenizer.ggml.bos_token_id": 4}
    plain = write_gguf(tmp_path / "plain.gguf", "llama", metadata, llama_tensors())
    framed = write_gguf(
        tmp_path / "framed.gguf", "llama", metadata | {"tokenizer.ggml.add_bos_token": True}, llama_tensors()
    )
    assert windows(plain, "b" * 1100) == [[1] * 512] * 2
    assert windows(framed, "b" * 1100) == [[4] + [1] * 511] * 2


def test_one_stream_cannot_be_faster_than_its_weights_and_cache_are_read(tmp_path: Path) -> None:
    metadata = llama_metadata() | {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "smollm"}
    model = counted(write_gguf(tmp_path / "tiny.gguf", "llama", metadata, llama_tensors()))
    matrices = 6 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24
    assert (model.weight_bytes, model.body) == (4 * matrices, matrices - 6 * 16)
    found = floors(model, {"memory_gb_s": 1e-9, "int8_gop_s": 1.0, "fp32_gflop_s": 1e-9})
    assert found["single", "tok_s"] == pytest.approx(1 / (4 * matrices + 64 * 4 * 8))  # the tiny context is full
    attention = 4 * 2 * 8 * (64 * 65 / 2 + (2048 - 64) * 64)
    assert found["ttft", "s"] == pytest.approx(2 * 2048 * model.body + 2 * 6 * 16 + attention)


@pytest.mark.parametrize("name", ["side_by_side.py", "checkpoints.py"])
def test_a_command_starts(name: str) -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / name), "--help"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("usage")
