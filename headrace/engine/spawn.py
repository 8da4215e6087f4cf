"""Starts an engine process with next to nothing imported: a command does it first, and imports the rest meanwhile.

The process imports what it needs too, then waits on its standard input for its Job. `EngineProcess` takes it over;
nobody else speaks to it.
"""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import headrace
from headrace.base.config import child_environment


class Spawned:
    """A process that waits for its Job. As a context manager it ends it at exit, unless somebody has taken it over."""

    def __init__(self, backend: str) -> None:
        """Raises OSError."""
        self.socket, child_end = socket.socketpair()
        self.life, life_write = os.pipe()
        self._is_taken = self._has_job = False
        try:
            self.process = _start(backend, child_end.fileno(), life_write)
        except BaseException:
            os.close(self.life)
            self.socket.close()
            raise
        finally:
            os.close(life_write)
            child_end.close()

    def give(self, line: bytes) -> None:
        """Tells the process its Job. The first one counts, so a Job that is known early can be given early."""
        if self._has_job or self.process.stdin is None:
            return
        self._has_job = True
        with contextlib.suppress(BrokenPipeError):  # dead already: the life pipe tells
            self.process.stdin.write(line)
            self.process.stdin.close()

    def take(self) -> None:
        """From now on the caller answers for process, pipe and socket."""
        self._is_taken = True

    def __enter__(self) -> "Spawned":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_taken:
            return
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self.life)
        self.socket.close()


def _start(backend: str, child_end: int, life_write: int) -> subprocess.Popen[bytes]:
    arguments = [f"--socket={child_end}", f"--life={life_write}", f"--parent={os.getpid()}"]
    home = str(Path(headrace.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace.engine.process", *arguments, f"--backend={backend}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(child_end, life_write),
        env=child_environment(PYTHONPATH=os.pathsep.join(path for path in [*sys.path, home] if path)),
        process_group=0,  # Ctrl-C in a terminal is for the parent, which decides what becomes of the engine
    )
