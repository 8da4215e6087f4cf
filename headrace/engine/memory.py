"""How much memory this process may still take: the machine's, or its cgroup's or its own limit where that is less.

Reads /proc/meminfo, the limit of the address space (`ulimit -v`) and the cgroup files (version 2, or 1 where that is
mounted); writes nothing, decides nothing.
A cgroup counts the page cache of files as used; what the kernel can take back from it at once is free for us.
"""

import resource
from dataclasses import dataclass
from pathlib import Path

from headrace.base.cgroup import cgroups, read_text

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number near 2**63
_NAMES = {  # by version: limit, usage, and of the usage what can be taken back
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that may still be taken, and whose limit that is ("machine", "cgroup" or "address space limit")."""

    available: int
    limited_by: str


def available_memory(root: Path = Path("/")) -> Memory:
    """`root` is where /proc and /sys are found; tests give their own."""
    found = [Memory(_machine_available(root), "machine")]
    found += [Memory(left, "cgroup") for left in _cgroup_available(root)]
    found += [Memory(left, "address space limit") for left in _address_space_available(root)]
    return min(found, key=lambda memory: memory.available)


def _machine_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return 0


def _address_space_available(root: Path) -> list[int]:
    """What RLIMIT_AS leaves of the addresses of this process, which also count what is reserved and never touched."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = (read_text(root / "proc/self/statm") or "").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return []
    return [max(0, limit - int(pages[0]) * resource.getpagesize())]


def _cgroup_available(root: Path) -> list[int]:
    """What each limited cgroup from ours up to the top has left."""
    left = []
    for folder, version in cgroups(root, "memory"):
        limit_name, usage_name, reclaimable = _NAMES[version]
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            left.append(max(0, limit - usage + _statistic(folder / "memory.stat", reclaimable)))
    return left


def _number(path: Path) -> int | None:
    """None where the file is missing or says "max"."""
    text = read_text(path) or ""
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def show_bytes(count: int) -> str:
    """1536 MiB as "1.5 GiB": three digits at most."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1000 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 100 or unit == "bytes" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
