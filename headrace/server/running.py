"""Which servers run on this machine: one small file per server, for `headrace ps`. A dead server's file is swept."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec


class RunningServer(msgspec.Struct, frozen=True):
    pid: int
    started_at: float  # seconds since the epoch
    url: str
    model: str


@contextmanager
def registered(folder: Path, server: RunningServer) -> Iterator[None]:
    """Lists `server` under `folder` while the block runs. A folder that cannot be written is no reason not to serve."""
    path = folder / f"{server.pid}.json"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(server))
        temporary.replace(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def running(folder: Path) -> list[RunningServer]:
    """The servers that are alive, oldest first."""
    found = []
    for path in folder.glob("*.json"):
        try:
            server = msgspec.json.decode(path.read_bytes(), type=RunningServer)
        except (OSError, msgspec.DecodeError):
            continue
        if _alive(server.pid):
            found.append(server)
        else:
            with suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda server: server.started_at)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A recycled pid must not look like our server.
    try:
        return b"headrace" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
