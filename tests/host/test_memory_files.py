"""Whether a folder is in memory is read from the list of mounts."""

import os
from pathlib import Path

import pytest

from sluice.host.memory_files import is_in_memory


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """Root of a file system whose list of mounts has a tmpfs, and a folder on a file system of this type."""
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def listed(root: Path, kind: str) -> None:
    device = root.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = ("9 1 0:9999 / /run rw - tmpfs tmpfs rw", f"30 25 {number} / {root} rw,relatime shared:7 - {kind} none rw")
    (root / "proc/self/mountinfo").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ext4", False), ("overlay", False)])
def test_the_type_of_the_mount_decides(mounted: Path, kind: str, expected: bool) -> None:
    listed(mounted, kind)
    assert is_in_memory(mounted, mounted) is expected
    assert not is_in_memory(mounted / "missing", mounted)


def test_a_system_without_a_list_of_mounts(mounted: Path) -> None:
    assert not is_in_memory(mounted, mounted)


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="needs Linux")
def test_this_system() -> None:
    assert not is_in_memory(Path("/proc"))
