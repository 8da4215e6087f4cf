"""How many compute threads this process may use: min(affinity, floor(cgroup CPU quota), physical cores).

Files in, a number out. More threads than the quota grants make every step wait for throttled ones; two threads on one
core's hyperthreads share its multipliers.
"""

import os
from collections.abc import Iterator
from pathlib import Path


def default_threads(root: Path = Path("/")) -> int:
    """At least 1. `root` is where proc and sys lie."""
    allowed = os.sched_getaffinity(0)
    limits = [len(allowed), physical_cores(root, allowed), *(int(quota) for quota in cpu_quotas(root))]
    return max(1, min(limits))


def physical_cores(root: Path, cpus: set[int]) -> int:
    """Distinct cores among `cpus`, by the kernel's lists of siblings; each cpu counts where there is none."""
    cores = set()
    for cpu in cpus:
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(_read(path) or str(cpu))
    return len(cores)


def cpu_quotas(root: Path) -> Iterator[float]:
    """CPUs granted by the cgroup of this process and by each of its ancestors, v2 or v1."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        for folder in _ancestors(base, path):
            quota = _v1_quota(folder) if controllers else _v2_quota(folder)
            if quota is not None:
                yield quota


def _ancestors(base: Path, path: str) -> Iterator[Path]:
    """The cgroup's folder and those above it. In a container the path may not exist below the mount: then the mount."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:count])
        if folder.is_dir():
            yield folder


def _v2_quota(folder: Path) -> float | None:
    fields = (_read(folder / "cpu.max") or "").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _v1_quota(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
