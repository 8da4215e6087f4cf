"""What every command takes: TOML tables, words for values, licence notes."""

import os
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from headrace.cli.main import COMMANDS
from headrace.cli.options import COMMAND_TABLES


def headrace(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_every_command_with_options_of_its_own_has_a_table() -> None:
    modules = [import_module(f"headrace.cli.{name}") for name in (*COMMANDS, "bench_kernels")]
    assert {module.COMMAND.table for module in modules if fields(module.COMMAND.own)} == set(COMMAND_TABLES)


def test_a_table_of_another_command_disturbs_none(tmp_path: Path) -> None:
    toml = tmp_path / "headrace.toml"
    toml.write_text("[inspect]\nfull = true\n[run]\nstats = true\n")
    done = headrace("models", "--config", str(toml), HEADRACE_INSPECT_FULL="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_help_says_what_a_value_looks_like() -> None:
    text = headrace("serve", "--help").stdout
    assert "--kv-cache-memory-bytes SIZE" in text
    assert "--max-model-len COUNT" in text


@pytest.mark.parametrize("command", ["pull", "inspect", "run", "serve"])
def test_a_licence_is_said_before_a_fetch(command: str, tmp_path: Path) -> None:
    # A hub that nobody answers for: the note comes first, then the failure.
    nowhere = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    port = ["--port", "0"] if command == "serve" else []
    done = headrace(command, "gemma3-1b", *port, "--cache-dir", str(tmp_path), **nowhere)
    assert done.returncode == 1
    assert "gemma3-1b: Gemma needs an accepted licence" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_result_that_cannot_be_written_is_still_shown(tmp_path: Path) -> None:
    from headrace.base.errors import HeadraceError
    from headrace.cli.bench import _write

    with pytest.raises(HeadraceError, match=r"--output .*nowhere/x\.json: No such file"):
        _write(tmp_path / "nowhere" / "x.json", {})
