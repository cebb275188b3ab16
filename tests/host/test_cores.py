"""File systems like those in containers: /proc/self/cgroup, /proc/self/mountinfo and the groups' files."""

import os

import pytest

from sluice.host import cores
from sluice.host.cores import usable_cores

V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "33 31 0:30 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
DISK = "23 1 8:1 / / rw - ext4 /dev/sda rw"


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host with 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


@pytest.fixture
def machine(tmp_path):
    """Writes a file system, with files of groups by their path below /sys/fs/cgroup, and returns its usable cores."""

    def cores(group: str, mounts: list[str], files: dict[str, str], top: str = "/") -> int:
        proc = tmp_path / "proc/self"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "cgroup").write_text(group + "\n")
        (proc / "mountinfo").write_text("\n".join([DISK, *mounts]).format(top=top) + "\n")
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return usable_cores(tmp_path)

    return cores


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("max 100000", 64), ("9900000 100000", 64)],
)
def test_a_containers_quota_is_rounded_down_and_at_least_one(machine, quota, expected):
    assert machine("0::/", [V2], {"cpu.max": quota}) == expected


def test_the_lowest_quota_of_the_group_and_its_ancestors_applies(machine):
    files = {
        "cpu.max": "max 100000",
        "pods/cpu.max": "300000 100000",
        "pods/one/cpu.max": "max 100000",
        "other/cpu.max": "100000 100000",
    }
    assert machine("0::/pods/one", [V2], files) == 3
    assert machine("0::/pods/one", [V2], {"pods/one/cpu.max": "150000 50000"}) == 3
    assert machine("0::/pods/one", [V2], {"pods/one/cpu.max": "100000 50000"}) == 2


@pytest.mark.parametrize("quota", ["-1", "600000"])
def test_cgroups_v1(machine, quota):
    folder = "cpu,cpuacct/docker"
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        f"{folder}/cpu.cfs_quota_us": "800000",
        f"{folder}/cpu.cfs_period_us": "100000",
        f"{folder}/abc/cpu.cfs_quota_us": quota,
        f"{folder}/abc/cpu.cfs_period_us": "100000",
        "memory/docker/abc/cpu.cfs_quota_us": "100000",
        "memory/docker/abc/cpu.cfs_period_us": "100000",
    }
    group = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/"
    assert machine(group, [V1, MEMORY], files) == (8 if quota == "-1" else 6)


@pytest.mark.parametrize(("group", "top"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/other"), ("/", "/")])
def test_a_container_sees_its_own_group_at_the_mount_point(machine, group, top):
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    assert machine(f"4:cpu,cpuacct:{group}", [V1], files, top) == 2
    assert machine(f"0::{group}", [V2], {"cpu.max": "300000 100000"}, top) == 3


def test_both_versions_apply_where_both_are_mounted(machine):
    unified = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    files = {
        "unified/cpu.max": "500000 100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "400000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert machine("4:cpu,cpuacct:/\n0::/", [unified, V1], files) == 4


def test_affinity_counts_too(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert machine("0::/", [V2], {"cpu.max": "400000 100000"}) == 2


def test_without_control_groups(tmp_path):
    assert usable_cores(tmp_path) == 64


def test_this_machine(monkeypatch):
    monkeypatch.undo()
    assert 1 <= cores.usable_cores() <= (os.cpu_count() or 1)
