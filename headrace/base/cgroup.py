"""Where the kernel keeps the limits of this process: its control groups, version 2 or 1.

A limit anywhere between a process's own group and the top binds it, so all of them are given. Reads; decides nothing.
"""

from collections.abc import Iterator
from pathlib import Path


def cgroups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, version) of each group that limits this process by `controller` ("cpu", "memory"), its own first.

    `root` is where proc and sys lie. In a container the group's path may not exist below the mount: the mount is given.
    """
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts, version = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], 2
        elif controller in controllers.split(","):
            mounts, version = [f"sys/fs/cgroup/{controller}"], 1
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for mount in mounts:
            folders = [root.joinpath(mount, *parts[:depth]) for depth in range(len(parts), -1, -1)]
            yield from ((folder, version) for folder in folders if folder.is_dir())


def read_text(path: Path) -> str | None:
    """The file's text without the white space around it; None where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
