"""`headrace run` and `headrace inspect`, on the token oracle and on the real model."""

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "headrace", "run"]


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], input=text or "", capture_output=True, text=True, check=False)


def test_one_answer_with_stats() -> None:
    done = run("fake", "Hello", "--backend", "fake", "--stats", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "[12 tokens, " in done.stderr
    assert "first token after" in done.stderr
    assert "the answer reached its token limit" in done.stderr


def test_prompt_from_standard_input() -> None:
    done = run("--backend", "fake", "--max-tokens", "8", text="Hello from a pipe")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_prompt_that_does_not_fit_is_an_error_not_a_truncation() -> None:
    done = run("fake", "x" * 300, "--backend", "fake", "--max-model-len", "128")
    assert done.returncode == 1
    assert "error:" in done.stderr
    assert "128" in done.stderr


def read_until(terminal: int, wanted: bytes, seconds: float = 60) -> bytes:
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], seconds)
        assert ready, f"no {wanted!r} within {seconds} s; saw {seen!r}"
        seen += os.read(terminal, 4096)
    return seen


def test_a_conversation_in_a_terminal() -> None:
    terminal, child_end = pty.openpty()
    with subprocess.Popen(
        [*RUN, "--backend", "fake", "--max-tokens", "5", "--stats"], stdin=child_end, stdout=child_end, stderr=child_end
    ) as process:
        os.close(child_end)
        read_until(terminal, b"> ")
        os.write(terminal, b"/nonsense\n")
        read_until(terminal, b"unknown command /nonsense")
        os.write(terminal, b"Hello\n")
        first = read_until(terminal, b"cached]")
        assert b"[5 tokens" in first
        os.write(terminal, b"And again\n")
        read_until(terminal, b"cached]")
        os.write(terminal, b"/exit\n")
        assert process.wait(timeout=30) == 0
    os.close(terminal)


def test_ctrl_c_ends_an_answer_and_then_the_conversation(smollm2_gguf: Path) -> None:
    terminal, child_end = pty.openpty()
    with subprocess.Popen(
        [*RUN, str(smollm2_gguf), "--temperature", "0"],
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
        start_new_session=True,
    ) as process:
        os.close(child_end)
        read_until(terminal, b"> ")
        for _ in range(2):
            os.write(terminal, b"Write a very long story.\n")
            read_until(terminal, b" the ")
            process.send_signal(signal.SIGINT)
            read_until(terminal, b"\n> ")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    os.close(terminal)


def test_ctrl_c_ends_a_single_answer(smollm2_gguf: Path) -> None:
    with subprocess.Popen([*RUN, str(smollm2_gguf), "Write a very long story."], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


@pytest.mark.parametrize("arguments", [(), ("fake", "\udcff\udcfe")], ids=["piped", "argument"])
def test_bytes_that_are_no_text_are_replaced(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*RUN, *arguments, "--backend", "fake", "--max-tokens", "4"],
        input=b"\xff\xfe",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_real_model_answers(smollm2_gguf: Path) -> None:
    done = run(
        str(smollm2_gguf),
        "The capital of France is",
        "--raw",
        "--temperature",
        "0",
        "--max-tokens",
        "2",
        "--max-model-len",
        "256",
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_inspect_shows_graph_sizes_and_kernels(smollm2_gguf: Path) -> None:
    command = [sys.executable, "-m", "headrace", "inspect", str(smollm2_gguf)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for wanted in ("134.5 million", "Q4_1 66.4 MB", "layers 0 to 29, 30 alike", "KV bytes per token", "gemm w4 x int8"):
        assert wanted in done.stdout
    assert "reference" not in done.stdout
    full = subprocess.run([*command, "--full"], capture_output=True, text=True, check=True)
    assert "blk.29.ffn_down" in full.stdout


def test_inspect_of_a_broken_file_names_it(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    command = [sys.executable, "-m", "headrace", "inspect", str(broken)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr
