"""default_threads against made-up machines: affinity, quotas along the cgroup chain, siblings on one core."""

import os
from pathlib import Path

import pytest

from headrace.backend.threads import default_threads


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight processors on eight cores, no cgroup."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    return tmp_path


def test_affinity_without_any_files(machine: Path) -> None:
    assert default_threads(machine) == 8


def test_a_v2_quota_is_rounded_down(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/cpu.max", "765000 100000\n")
    assert default_threads(machine) == 7


def test_no_quota(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert default_threads(machine) == 8


def test_the_tightest_ancestor_counts(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/a/b\n")
    write(machine, "sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    write(machine, "sys/fs/cgroup/a/cpu.max", "300000 100000\n")
    write(machine, "sys/fs/cgroup/cpu.max", "600000 100000\n")
    assert default_threads(machine) == 3


def test_a_container_whose_path_is_not_below_its_mount(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/docker/0123\n")
    write(machine, "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert default_threads(machine) == 2


def test_less_than_one_processor_is_one_thread(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert default_threads(machine) == 1


def test_a_v1_quota(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,cpuacct:/job\n")
    write(machine, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "450000\n")
    write(machine, "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert default_threads(machine) == 4


def test_hyperthreads_share_a_core(machine: Path) -> None:
    for cpu in range(8):
        path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(machine, path, f"{cpu % 4},{cpu % 4 + 4}\n")
    assert default_threads(machine) == 4
