"""Control groups of made-up machines."""

from pathlib import Path

from headrace.base.cgroup import cgroups, read_text


def machine(root: Path, groups: str, *folders: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    return root


def test_its_own_group_comes_first_and_the_top_last(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a/b\n", "sys/fs/cgroup/a/b")
    folders = ["sys/fs/cgroup/a/b", "sys/fs/cgroup/a", "sys/fs/cgroup"]
    assert list(cgroups(root, "cpu")) == [(root / folder, 2) for folder in folders]


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/y\n", "sys/fs/cgroup/memory/x", "sys/fs/cgroup/cpu")
    assert [folder.name for folder, version in cgroups(root, "memory") if version == 1] == ["x", "memory"]
    assert list(cgroups(root, "cpu")) == [(root / "sys/fs/cgroup/cpu", 1)]  # the path is not below the mount
    assert list(cgroups(root, "io")) == []


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert list(cgroups(tmp_path, "cpu")) == []
    assert read_text(tmp_path / "nothing") is None


def test_a_path_that_climbs_stays_below_the_mount(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/../../etc\n", "sys/fs/cgroup", "etc")
    assert list(cgroups(root, "cpu")) == [(root / "sys/fs/cgroup", 2)]
