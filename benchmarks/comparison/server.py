"""A server as a process: started at one of its settings on a free port, waited for, measured, stopped."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from comparison.works import first_token
from headrace.bench.client import LoadError, Target, fetch

_READY_SECONDS = 900
_STOP_SECONDS = 30


@dataclass(frozen=True)
class Setting:
    """Options of a server under one name, and the works for which they are worth trying."""

    name: str
    options: tuple[str, ...]
    works: tuple[str, ...]


@dataclass(frozen=True)
class Contestant:
    """A server with one file. `command` holds {port}, a setting's options follow it; `bits` is a weight's, about."""

    server: str
    file: str
    path: Path
    bits: int
    command: tuple[str, ...]
    settings: tuple[Setting, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.server} {self.file}"


class ServerError(Exception):
    """The server did not start."""


@dataclass(frozen=True)
class Running:
    target: Target
    process_id: int
    cold_start: float  # seconds from starting the process to the first token of a short request


@contextmanager
def running(contestant: Contestant, setting: Setting, log: Path) -> Iterator[Running]:
    """The server, ready, with its first request answered. Raises ServerError; what it printed is in `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [part.format(port=port) for part in (*contestant.command, *setting.options)]
    target = Target("127.0.0.1", port, "", False)
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            env=os.environ | contestant.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, target)
            asyncio.run(first_token(target))
            yield Running(target, process.pid, time.monotonic() - start)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], target: Target) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"ended with {process.returncode} before it was ready")
        with suppress(LoadError):
            if asyncio.run(fetch(target, "GET", "/health"))[0] == 200:
                return
        time.sleep(0.02)
    raise ServerError(f"was not ready within {_READY_SECONDS} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The process and everything that it started: the same process group, and what left it."""
    others = descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for process_id in others:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def descendants(process_id: int) -> list[int]:
    """Ids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, queue = [], [process_id]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def summed_pss(process_id: int) -> float:
    """MiB of memory of the process and all below it, shared pages divided among those that share them."""
    total = 0
    for one in (process_id, *descendants(process_id)):
        with suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024
