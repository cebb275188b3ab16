"""Folders of launchers are private, locked while a process uses them, and removed afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.launch.folder import LOCK, Folder, remove_stale


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("SHORT_TEMP", "SHARED_MEMORY"):
        monkeypatch.setattr(f"sluice.launch.folder.{name}", str(tmp_path))
    return tmp_path


def abandon(folder: Folder) -> Path:
    """Leave the folder as a killed launcher does."""
    (folder.path / "socket").touch()
    os.close(folder.lock)
    return folder.path


def test_only_unlocked_folders_are_removed(temporary) -> None:
    used, stale = Folder(), abandon(Folder())
    foreign = temporary / "sluice-of-another-user"
    foreign.mkdir()
    (temporary / "sluice-file").touch()
    (temporary / "sluice-link").symlink_to(stale)
    remove_stale()
    assert not stale.exists()
    assert sorted(each.name for each in temporary.iterdir()) == sorted(
        [used.path.name, foreign.name, "sluice-file", "sluice-link"]
    )
    used.remove()
    used.remove()
    assert not used.path.exists()


def test_folders_in_memory_are_removed_too(temporary, monkeypatch) -> None:
    memory = temporary / "shm"
    memory.mkdir()
    monkeypatch.setattr("sluice.launch.folder.SHARED_MEMORY", str(memory))
    used, stale = Folder(str(memory)), abandon(Folder(str(memory)))
    assert stale.parent == memory
    remove_stale()
    assert list(memory.iterdir()) == [used.path]
    used.remove()


def test_a_new_folder_without_a_lock_is_not_stale(temporary) -> None:
    new = temporary / "sluice-new"
    new.mkdir()
    (new / f"{LOCK}.new").touch()
    remove_stale()
    assert new.exists()


def test_a_link_is_not_followed(temporary, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / LOCK).touch()
    (temporary / "sluice-link").symlink_to(elsewhere)
    inside = temporary / "sluice-inside"
    inside.mkdir()
    (inside / LOCK).symlink_to(elsewhere / LOCK)
    remove_stale()
    assert elsewhere.exists()
    assert inside.exists()


@pytest.mark.process
def test_a_folder_is_not_stale_while_a_child_runs() -> None:
    folder = Folder()
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(folder.lock,)) as child:
        path = abandon(folder)
        remove_stale()
        assert path.exists()
        child.communicate()
    remove_stale()
    assert not path.exists()
