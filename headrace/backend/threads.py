"""How many compute threads this process may use: min(affinity, floor(cgroup CPU quota), physical cores).

Files in, a number out. More threads than the quota grants make every step wait for throttled ones; two threads on one
core's hyperthreads share its multipliers.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from headrace.base.cgroup import cgroups, read_text


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
        cores.add(read_text(path) or str(cpu))
    return len(cores)


def cpu_quotas(root: Path) -> Iterator[float]:
    """CPUs granted by the cgroup of this process and by each of its ancestors."""
    for folder, version in cgroups(root, "cpu"):
        quota = _v1_quota(folder) if version == 1 else _v2_quota(folder)
        if quota is not None:
            yield quota


def _v2_quota(folder: Path) -> float | None:
    fields = (read_text(folder / "cpu.max") or "").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _v1_quota(folder: Path) -> float | None:
    quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)
