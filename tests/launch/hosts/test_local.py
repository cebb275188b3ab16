"""The folder in memory for the KV caches of the engines of this machine."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.launch import OptionsError
from sluice.launch.folder import remove_stale
from sluice.launch.hosts.local import LocalHosts
from sluice.launch.plan import Plan, Service, services

SLEEPER = ("/bin/sh", "-c", "exec sleep 60")
"""A service that ignores its arguments."""

LAUNCHER = """
import signal, sys
from sluice.launch.folder import Folder
folder = Folder(sys.argv[1])
(folder.path / "layout").mkdir()
(folder.path / "layout" / "engine-0.00000001.pool").write_bytes(bytes(4096))
print(folder.path, flush=True)
signal.pause()
"""
"""What a launcher does with a folder in memory, until it is killed."""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is taken for a tmpfs with room."""
    folder, temporary = tmp_path / "shm", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("sluice.launch.folder.SHARED_MEMORY", str(folder))
    monkeypatch.setattr("sluice.launch.hosts.local.SHARED_MEMORY", str(folder))
    monkeypatch.setattr("sluice.launch.folder.SHORT_TEMP", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("sluice.launch.kv_files.no_room", lambda _: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return folder


class Opened:
    """The hosts of a ring, and its services."""

    def __init__(self, **options) -> None:
        plan = Plan("model", "name", **options)
        engine = next(each for each in services(plan, Path("/x")) if each.role == "engine")
        self.hosts = LocalHosts(plan, engine.settings(os.environ))
        self.services = self.hosts.open()

    @property
    def engines(self) -> list[Service]:
        return [each for each in self.services if each.role == "engine"]

    @property
    def folders(self) -> set[str | None]:
        """The folder that each engine has for its KV cache."""
        return {engine.settings({}).pool_folder for engine in self.engines}

    @property
    def remarks(self) -> list[tuple[str, str, str]]:
        return [
            (line.event, line.fields["level"], line.fields.get("reason", line.fields.get("folder")))
            for line in self.hosts.remarks
        ]

    def vanish(self) -> None:
        """Release what the kernel releases when a launcher is killed."""
        for folder in (self.hosts.folder, self.hosts._kv_folder):
            os.close(folder.lock)


@pytest.fixture
def opened() -> Iterator[list[Opened]]:
    rings: list[Opened] = []
    yield rings
    for each in rings:
        each.hosts.close()


def test_all_engines_share_a_private_folder_until_the_ring_ends(memory: Path) -> None:
    ring = Opened(engines=2)
    (folder,) = memory.iterdir()
    assert folder.name.startswith("sluice-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert ring.folders == {str(folder)}
    assert ring.remarks == [("kv_cache_in_files", "info", str(folder))]
    (folder / "layout").mkdir()
    (folder / "layout" / "engine-0.00000001.pool").touch()
    ring.hosts.close()
    ring.hosts.close()
    assert not list(memory.iterdir())


def test_files_of_an_engine_that_does_not_return_are_deleted(memory: Path, opened: list[Opened]) -> None:
    opened.append(ring := Opened(engines=2))
    layout = next(memory.iterdir()) / "layout"
    layout.mkdir()
    for name in ("engine-0.00000001.pool", "engine-1.00000001.pool"):
        (layout / name).touch()
    ring.hosts.discard("engine-1")
    ring.hosts.discard("router")
    assert [each.name for each in layout.iterdir()] == ["engine-0.00000001.pool"]


def test_a_users_folder_is_passed_and_never_removed(memory: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "layout").mkdir(parents=True)
    file = mine / "layout" / "engine-0.00000001.pool"
    file.touch()
    ring = Opened(engine_args={"kv_folder": str(mine)})
    assert ring.folders == {str(mine)}
    assert ring.remarks == []
    ring.hosts.discard("engine-0")
    ring.hosts.close()
    assert file.exists()
    assert not list(memory.iterdir())


@pytest.mark.parametrize(
    ("options", "level"),
    [({}, "info"), ({"prefill_engines": 1, "decode_engines": 1}, "warning")],
)
def test_without_room_the_reason_is_logged(memory, opened, monkeypatch, options, level) -> None:
    monkeypatch.setattr("sluice.launch.kv_files.no_room", lambda folder: f"{folder} has 64 MiB")
    opened.append(ring := Opened(**options))
    assert ring.folders == {None}
    assert ring.remarks == [("kv_cache_private", level, f"{memory} has 64 MiB")]
    assert not list(memory.iterdir())


def test_the_folder_can_be_switched_off(memory: Path, opened: list[Opened]) -> None:
    opened.append(ring := Opened(engine_args={"kv_folder": "none"}))
    assert ring.folders == {None}
    assert ring.remarks == [("kv_cache_private", "info", "kv_folder is none")]


def test_a_folder_that_cannot_be_created(memory: Path, opened: list[Opened]) -> None:
    memory.rmdir()
    opened.append(ring := Opened())
    assert ring.folders == {None}
    ((event, _, reason),) = ring.remarks
    assert event == "kv_cache_private"
    assert "No such file or directory" in reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_folder": "none"}, "kv_folder is none"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2"),
        ({"device": "cuda"}, "device is cuda, without kv_host_memory"),
    ],
)
def test_a_keeper_of_private_memory_is_refused(memory, opened, settings, reason) -> None:
    with pytest.raises(
        OptionsError, match=f"^kv_disk: a keeper .*, but the KV caches are in private memory: {reason}$"
    ):
        Opened(kv_disk="/disk", engine_args=settings)
    assert not list(memory.iterdir())


def test_a_keeper_has_the_folder_of_the_engines(memory: Path, tmp_path: Path, opened: list[Opened]) -> None:
    mine = tmp_path / "mine"
    for settings in ({}, {"kv_folder": str(mine)}):
        opened.append(ring := Opened(kv_disk="/disk", engine_args=settings))
        (keeper,) = (each.settings({}) for each in ring.services if each.role == "keeper")
        assert ring.folders == {str(keeper.kv_folder)}
        assert keeper.listen == f"ipc://{ring.hosts.folder.path}/keeper"
    assert keeper.kv_folder == mine


@pytest.mark.process
def test_after_a_killed_launcher_the_folder_is_removed_once_its_engines_have_ended(memory: Path) -> None:
    ring = Opened(python=SLEEPER)
    (folder,) = memory.iterdir()
    child = ring.hosts.start(ring.engines[0], lambda _: None, lambda _: None)
    ring.vanish()
    remove_stale()
    assert folder.exists()
    child.kill()
    child.wait(10)
    remove_stale()
    assert not folder.exists()


@pytest.mark.process
def test_the_next_ring_removes_what_a_killed_launcher_has_left(memory: Path, opened: list[Opened]) -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(memory)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        left = Path(launcher.stdout.readline().strip())
        opened.append(beside := Opened())
        assert {str(each) for each in memory.iterdir()} == {str(left), *beside.folders}
        launcher.kill()
    assert list(left.glob("*/*.pool"))
    opened.append(following := Opened())
    assert {str(each) for each in memory.iterdir()} == beside.folders | following.folders
