"""The number of CPU cores that this process may use, from its affinity and the CPU quotas of its cgroups (v1, v2)."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores, at least 1. `root`: root of the file system, for tests."""
    # Quotas are rounded down, because the kernel throttles all threads if they exceed the quota, and an engine shares
    # its quota with the other services in its container.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Quotas in cores of this process's group and its ancestors. All of them apply."""
    groups = _groups(root)
    for controller, top, point in _mounts(root):
        if controller not in groups:
            continue
        group = groups[controller]
        # In a container the path may be that of the host, outside of the mount. Then this process's group is at the
        # mount point.
        inside = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
        for part in (inside, *inside.parents):
            yield from _quota(point / part)


def _quota(folder: Path) -> Iterator[float]:
    """The quota of one group in cores, if it has one. "max" (v2) and -1 (v1) mean no limit."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if quota in ("", "max"):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        yield int(quota) / int(period)


def _groups(root: Path) -> dict[str, PurePosixPath]:
    """This process's group of each controller, see cgroups(7)."""
    lines = (line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines())
    return {controller: PurePosixPath(path) for _, controllers, path in lines for controller in controllers.split(",")}


def _mounts(root: Path) -> Iterator[tuple[str, PurePosixPath, Path]]:
    """Hierarchies with CPU quotas, see proc_pid_mountinfo(5): the controller as in /proc/self/cgroup ("cpu" for v1, ""
    for v2), the group at the mount point, and the mount point."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, file_system = line.partition(" - ")
        top, point = mount.split()[3:5]
        kind, _, options = file_system.split(maxsplit=2)
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            yield "cpu" if kind == "cgroup" else "", PurePosixPath(top), root / point.lstrip("/")


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
