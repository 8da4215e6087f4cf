"""The measure on numbers checked by hand and on small models; the gate on a slice of the real one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from headrace.bench.quality import BackendLogits, QualityError, compare, compare_logits, join, windows
from headrace.cli.main import main
from headrace.model.checkpoint import FileCheckpoint, open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.numpy_executor import NumpyExecutor

TINY = Path(__file__).parents[1] / "data" / "tiny"


def reference_of(checkpoint: FileCheckpoint) -> NumpyExecutor:
    return NumpyExecutor(build_graph(checkpoint.config, checkpoint), checkpoint, "float32")


def test_kl_and_losses_of_known_distributions() -> None:
    expected = np.log(np.array([[0.5, 0.25, 0.25]], np.float32)) + 7  # a constant on all logits changes nothing
    found = np.log(np.array([[0.25, 0.25, 0.5]], np.float32))
    result = compare_logits(expected, found, np.array([0]))
    assert result.mean_kl == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2), rel=1e-5)
    assert result.reference_perplexity == pytest.approx(2, rel=1e-5)
    assert result.perplexity == pytest.approx(4, rel=1e-5)
    assert result.perplexity_change == pytest.approx(1, rel=1e-5)
    assert not result.agrees.any() and not result.passes


def test_equal_logits_cost_nothing_whatever_their_size() -> None:
    logits = np.random.default_rng(0).normal(0, 40, (5, 333)).astype(np.float32)
    result = compare_logits(logits, logits.copy(), np.arange(5))
    assert result.mean_kl == 0 and result.perplexity_change == 0 and result.agrees.all() and result.passes


def test_windows_lose_no_token_and_begin_alike() -> None:
    parts = windows(list(range(10, 30)), 8, [1])
    assert all(part[0] == 1 and len(part) <= 8 for part in parts)
    assert [i for part in parts for i in part[1:]] == list(range(10, 30))
    assert windows([5], 8) == []  # one token predicts nothing


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(QualityError, match="shorter than two tokens"):
        join([])


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen2"])
def test_float_weights_stay_close_to_the_reference_over_several_chunks(name: str) -> None:
    """What is left is the bf16 KV cache and attention."""
    checkpoint = open_checkpoint(TINY / name)
    ids = np.random.default_rng(1).integers(3, checkpoint.config.vocab_size, 200).tolist()
    result = compare(reference_of(checkpoint), BackendLogits(checkpoint, 200, threads=2), [ids])
    assert len(result.kl) == 199
    assert result.mean_kl < 1e-3


def test_another_models_weights_are_seen() -> None:
    checkpoint, other = open_checkpoint(TINY / "llama3"), open_checkpoint(TINY / "qwen2")
    ids = np.random.default_rng(1).integers(3, 160, 60).tolist()
    result = compare(reference_of(other), BackendLogits(checkpoint, 64, threads=2), [ids])
    assert result.mean_kl > 0.1 and not result.passes


def test_the_command_prints_a_row_for_each_text_and_exits_by_the_gate(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(__file__).parents[2] / "headrace" / "bench" / "corpus" / "french.txt"
    (tmp_path / "one.txt").write_text(text.read_text()[:600])
    (tmp_path / "two.txt").write_text("def double(x):\n    return 2 * x\n" * 5)
    names = f"{tmp_path / 'one.txt'},{tmp_path / 'two.txt'}"
    status = main(["quality", str(smollm2_gguf), "--text", names, "--window", "64", "--max-tokens", "60"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["text", "one.txt", "two.txt", "all"]
    assert [int(row[1]) for row in rows[1:]] == [59, 59, 118]  # the first token of a window is not predicted
    change, kl = float(rows[3][4].rstrip("%")), float(rows[3][5])
    assert status == (0 if kl < 0.002 and abs(change) < 0.3 else 1)


def test_the_gate_lets_a_model_with_its_own_arithmetic_pass(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 0 exists: the candidate is replaced by the reference itself."""

    class Same:
        def __init__(self, checkpoint: FileCheckpoint, *_: object) -> None:
            self._exact = reference_of(checkpoint)

        def chunks(self, ids: list[int]) -> Iterator[npt.NDArray[np.float32]]:
            yield self._exact.logits(ids, range(len(ids) - 1)).astype(np.float32)

    monkeypatch.setattr("headrace.bench.quality.BackendLogits", Same)
    (tmp_path / "one.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3)
    assert main(["quality", str(smollm2_gguf), "--text", str(tmp_path / "one.txt"), "--window", "16"]) == 0


def test_the_default_path_stays_near_float32_arithmetic(smollm2_gguf: Path) -> None:
    """A small guard of what docs/quality.md measures on 50,000 tokens."""
    from headrace.text.tokenizer import Tokenizer

    checkpoint = open_checkpoint(smollm2_gguf)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata, smollm2_gguf)
    folder = Path(__file__).parents[2] / "headrace" / "bench" / "corpus"
    texts = [
        tokenizer.encode((folder / name).read_text())[:300] for name in ("english.txt", "python.txt", "polish.txt")
    ]
    result = compare(reference_of(checkpoint), BackendLogits(checkpoint, 300, threads=2), texts)
    assert result.mean_kl < 0.008
    assert abs(result.perplexity_change) < 0.015


def test_a_missing_text_is_named(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", str(smollm2_gguf), "--text", "no-such-file.txt"]) == 2
    assert "no-such-file.txt" in capsys.readouterr().err
