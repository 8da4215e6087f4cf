"""The command line as a person meets it, in real processes."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.backend import pack_file
from headrace.base.config import Config, flag
from headrace.cli.main import COMMANDS


def headrace(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; from headrace.cli.main import main; main(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)
    heavy = ("numpy", "tokenizers", "uvicorn", "starlette", "jinja2", "asyncio", "argparse")
    assert not [name for name in heavy if f"'{name}'" in done.stderr]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = headrace(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: headrace {name}" in done.stdout


def test_serve_has_a_flag_for_every_field() -> None:
    text = headrace("serve", "--help").stdout
    for spec in dataclasses.fields(Config):
        assert spec.name == "model" or flag(spec.name) in text


def test_version() -> None:
    assert headrace("--version").stdout.startswith("headrace ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], "unknown command 'srve' (did you mean serve?)"),
        (["serve", "--prot", "1"], "unknown flag --prot (did you mean --port?)"),
        (["serve", "--port", "x"], "--port: 'x' is not a whole number"),
        (["serve", "--host", "0.0.0.0"], "set --api-key"),
        (["bench", "--goodput", "ttft=5"], "--goodput"),
        (["bench", "--metric-percentiles", "101"], "--metric-percentiles"),
    ],
)
def test_wrong_calls_name_the_cure_and_exit_with_2(arguments: list[str], message: str) -> None:
    done = headrace(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_variables_and_toml_reach_a_command(tmp_path: Path) -> None:
    done = headrace("bench", HEADRACE_BENCH_NUM_PROMPTS="none")
    assert "HEADRACE_BENCH_NUM_PROMPTS: 'none' is not a count" in done.stderr
    toml = tmp_path / "headrace.toml"
    toml.write_text("[bench]\nnum_prompt = 3\n")
    done = headrace("bench", "--config", str(toml))
    assert "unknown key 'num_prompt' (did you mean num_prompts?)" in done.stderr


def test_mistyped_variable_is_said() -> None:
    done = headrace("models", HEADRACE_CACHE_DRI="x")
    assert "HEADRACE_CACHE_DRI is not known (did you mean HEADRACE_CACHE_DIR?)" in done.stderr
    assert done.returncode == 0


def test_a_machine_that_fails_is_named_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "headrace", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left" in done.stderr


def test_models_lists_the_catalog(tmp_path: Path) -> None:
    done = headrace("models", "--cache-dir", str(tmp_path), HF_HOME=str(tmp_path / "hf"))
    assert "smollm2-135m" in done.stdout
    assert "gemma3-270m" in done.stdout
    assert " is at " not in done.stdout


def test_rm_of_what_is_not_here(tmp_path: Path) -> None:
    done = headrace("rm", "smollm2-135m", "--cache-dir", str(tmp_path))
    assert done.returncode == 1
    assert "smollm2-135m is not here" in done.stderr
    assert headrace("rm", "nonsense", "--cache-dir", str(tmp_path)).returncode == 1


def test_rm_takes_the_packed_weights_of_the_model_with_it(tmp_path: Path) -> None:
    """Those of another model stay."""
    model = tmp_path / "models" / "smollm2-135m" / "model.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"x" * 1000)
    packed = tmp_path / "packed"
    packed.mkdir()
    for name, path in {"own": model, "other": tmp_path / "other.gguf"}.items():
        with (packed / f"{name}.pack").open("wb") as file:
            sections = {"w": np.zeros(3000, np.uint8)}
            header = pack_file.Header("1 avx2", str(path), [], "", pack_file.place(sections))
            for _ in pack_file.write(file.fileno(), header, sections):
                pass
    done = headrace("rm", "smollm2-135m", "--cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not model.exists()
    assert [path.name for path in packed.iterdir()] == ["other.pack"]


def test_ps_without_servers(tmp_path: Path) -> None:
    done = headrace("ps", "--cache-dir", str(tmp_path))
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
