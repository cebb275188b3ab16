"""Files of KV caches: room is detected, and files that no engine will take over are deleted."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sluice.launch.kv_files import delete_files, no_room, why_private
from sluice.settings.services import EngineSettings

MIB, GIB = 1 << 20, 1 << 30
LAYOUT = "0123456789abcdef"


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch):
    """Makes every folder a tmpfs of this size with this much free memory."""

    def set_space(size: int, free: int) -> None:
        space = SimpleNamespace(f_frsize=4096, f_blocks=size // 4096, f_bavail=free // 4096)
        monkeypatch.setattr("sluice.launch.kv_files.is_in_memory", lambda _: True)
        monkeypatch.setattr("sluice.launch.kv_files.os.statvfs", lambda _: space)

    return set_space


@pytest.mark.parametrize(
    ("size", "free", "reason"),
    [
        (64 * MIB, 64 * MIB, "/dev/shm has 64 MiB, less than 1024 MiB"),
        (GIB - 4096, GIB - 4096, "/dev/shm has 1023 MiB, less than 1024 MiB"),
        (GIB, 256 * MIB, ""),
        (GIB, 256 * MIB - 4096, "/dev/shm has 255 MiB free of 1024 MiB, less than 256 MiB"),
        (64 * GIB, 16 * GIB, ""),
        (64 * GIB, 16 * GIB - 4096, "/dev/shm has 16383 MiB free of 65536 MiB, less than 16384 MiB"),
        (0, 0, "/dev/shm has 0 MiB, less than 1024 MiB"),
    ],
)
def test_room(space, size: int, free: int, reason: str) -> None:
    space(size, free)
    assert no_room(Path("/dev/shm")) == reason


def test_a_disk_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.launch.kv_files.is_in_memory", lambda _: False)
    assert no_room(tmp_path) == f"{tmp_path} is not a tmpfs"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"device": "cpu"}, ""),
        ({"device": "cuda", "kv_host_memory": "8GiB"}, ""),
        ({"device": "cuda"}, "device is cuda, without kv_host_memory"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2"),
        ({"kv_folder": "none"}, "kv_folder is none"),
        ({"kv_folder": "/dev/shm/mine", "device": "cuda"}, "kv_folder is set"),
    ],
)
def test_settings_without_files(space, settings: dict[str, str], reason: str) -> None:
    space(GIB, GIB)
    assert why_private(EngineSettings(model="m", **settings), Path("/dev/shm")) == reason


class PoolFile:
    """A file as an engine keeps it, with its lock."""

    def __init__(self, folder: Path, name: str, layout: str = LAYOUT) -> None:
        self.path = folder / layout / name
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.write_bytes(b"blocks")
        self._descriptor = os.open(self.path, os.O_RDWR)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def die(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def dead(tmp_path: Path):
    """Creates a file whose engine has died."""

    def create(name: str, layout: str = LAYOUT) -> Path:
        file = PoolFile(tmp_path, name, layout)
        file.die()
        return file.path

    return create


@pytest.fixture
def living(tmp_path: Path) -> Iterator[PoolFile]:
    file = PoolFile(tmp_path, "engine-1.00000000.pool")
    yield file
    file.die()


def test_files_of_every_layout_are_deleted(dead, tmp_path: Path) -> None:
    files = [dead("engine-1.00000001.pool"), dead("engine-1.ffffffff.pool", layout="f" * 16)]
    delete_files(tmp_path, "engine-1")
    assert not any(file.exists() for file in files)


def test_a_living_engines_file_is_not_deleted(dead, living: PoolFile, tmp_path: Path) -> None:
    former = dead("engine-1.00000001.pool")
    delete_files(tmp_path, "engine-1")
    assert living.path.read_bytes() == b"blocks"
    assert not former.exists()


def test_the_memory_of_a_file_that_others_have_open_is_freed(dead, tmp_path: Path) -> None:
    with dead("engine-1.00000001.pool").open("rb") as reader:
        delete_files(tmp_path, "engine-1")
        assert os.fstat(reader.fileno()).st_size == 0


@pytest.mark.parametrize("other", ["engine-10.00000001.pool", "engine-1.x.00000001.pool", "engine-2.00000001.pool"])
def test_other_engines_files_are_left(dead, tmp_path: Path, other: str) -> None:
    file = dead(other)
    delete_files(tmp_path, "engine-1")
    assert file.read_bytes() == b"blocks"


def test_a_link_is_not_followed(dead, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    elsewhere.write_bytes(b"mine")
    (dead("engine-2.00000001.pool").parent / "engine-1.00000001.pool").symlink_to(elsewhere)
    delete_files(tmp_path, "engine-1")
    assert elsewhere.read_bytes() == b"mine"
