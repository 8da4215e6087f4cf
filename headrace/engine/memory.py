"""How much memory this process may still take: the machine's, or its cgroup's where that is less.

Reads /proc/meminfo and the cgroup files (version 2, or 1 where that is mounted); writes nothing, decides nothing.
A cgroup counts the page cache of files as used; what the kernel can take back from it at once is free for us.
"""

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number near 2**63


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that may still be taken, and whose limit that is ("machine" or "cgroup")."""

    available: int
    limited_by: str


def available_memory(root: Path = Path("/")) -> Memory:
    """`root` is where /proc and /sys are found; tests give their own."""
    machine = _machine_available(root)
    limits = [limit for limit in _cgroup_available(root) if limit < machine]
    return Memory(min(limits), "cgroup") if limits else Memory(machine, "machine")


def _machine_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return 0


def _cgroup_available(root: Path) -> list[int]:
    """What each limited cgroup from ours up to the top has left."""
    found: list[int] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                found += _walk(root / mount, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _walk(root / "sys/fs/cgroup/memory", path, names)
    return found


def _walk(mount: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """A limit anywhere above binds too. In a container the path may not exist: then the mount's root counts."""
    limit_name, usage_name, reclaimable = names
    parts = [part for part in path.split("/") if part and part != ".."]
    left = []
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            left.append(max(0, limit - usage + _statistic(folder / "memory.stat", reclaimable)))
    return left


def _number(path: Path) -> int | None:
    """None where the file is missing or says "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def show_bytes(count: int) -> str:
    """1536 MiB as "1.5 GiB": three digits at most."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1000 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 100 or unit == "bytes" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
