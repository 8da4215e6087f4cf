"""A real server in a process of its own, with a real engine process under it, on the fake backend."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import headrace

PATIENCE_S = 60.0  # for a busy machine; nothing is measured with it


class ServerProcess:
    """`with ServerProcess(folder) as server:` starts one on a free port; leaving ends it and checks that nothing stays.

    `folder` holds its cache and its log. `flags` are further command-line flags.
    """

    def __init__(self, folder: Path, *flags: str, ready: bool = True, env: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._flags = flags
        self._wait_ready = ready
        self._env = env or {}
        self.url = ""
        self.process: subprocess.Popen[str]

    def __enter__(self) -> "ServerProcess":
        home = str(Path(headrace.__file__).parents[1])
        command = [sys.executable, "-m", "headrace.cli.main", "serve", "--backend=fake", "--port=0", "--no-self-test"]
        with (self._folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"--cache-dir={self._folder}/cache", *self._flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": home, **self._env},
            )
        line = self.line_with("readyz")
        self.url = line.split("; ")[1].split("/readyz")[0]
        if self._wait_ready:
            self.line_with("curl")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
        try:
            self.wait()
        finally:
            self.process.kill()
            if self.process.stdout:
                self.process.stdout.close()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    @property
    def engine_pid(self) -> int:
        """The one child that runs the engine."""
        [pid] = [pid for pid in self.children() if "headrace.engine.process" in command_line(pid)]
        return pid

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def line_with(self, word: str) -> str:
        """The next line of standard output that holds `word`."""
        while self.process.stdout and (line := self.process.stdout.readline()):
            if word in line:
                return line
        raise AssertionError(f"the server ended without saying {word!r}:\n{self.log}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(PATIENCE_S)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """False for what is gone and for what only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
