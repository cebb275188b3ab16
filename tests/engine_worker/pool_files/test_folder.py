import os
import stat
import time
from pathlib import Path

import pytest

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.peer_files import SETTLED_SECONDS, SUFFIX
from engine_worker.pool_files.pool_file import PoolFile
from tests.engine_worker.pool_files.files import LAYOUT, content, digest, ignore, open_file, store


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*/*{SUFFIX}"))


def test_a_living_engines_file_is_not_adopted(shared_memory: Path) -> None:
    _, first = open_file(shared_memory, "a")
    _, second = open_file(shared_memory, "a")
    assert first.path != second.path


def test_an_engine_adopts_its_own_file_before_those_of_others(shared_memory: Path) -> None:
    opened = [open_file(shared_memory, name)[1] for name in ("c", "a", "b")]
    for file in opened:
        file.close()
    _, adopted = open_file(shared_memory, "a")
    assert adopted.path == opened[1].path
    _, another = open_file(shared_memory, "z")
    # It is named after its owner now.
    assert Path(another.path).name.startswith("z.")
    assert len(files(shared_memory)) == 3


def test_a_file_that_an_engine_did_not_survive_is_not_adopted_again(shared_memory: Path) -> None:
    """Between the lock and the end of the adoption."""
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    file.close()
    _, adopted = open_file(shared_memory, "a")
    assert adopted.path == file.path
    adopted.close()
    _, fresh = open_file(shared_memory, "a")
    assert fresh.path != file.path
    assert files(shared_memory) == [Path(fresh.path).name]


def test_a_file_may_be_adopted_again_and_again(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    for _ in range(3):
        file.close()
        _, file = open_file(shared_memory, "a")
        assert list(file.adopted()) == [(0, content(1))]


def test_the_name_of_another_engine_may_begin_with_this_ones(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a.b")
    store(file, 0, 1)
    file.close()
    _, fresh = open_file(shared_memory, "a", sizing="other")
    assert fresh.path != file.path
    assert Path(file.path).exists()


@pytest.mark.parametrize("change", ["sizing", "layout"])
def test_an_engines_useless_file_is_deleted(shared_memory: Path, change: str) -> None:
    _, file = open_file(shared_memory, "a")
    file.close()
    layout = LAYOUT._replace(name="other") if change == "layout" else LAYOUT
    _, fresh = open_file(shared_memory, "a", sizing=change if change == "sizing" else "", layout=layout)
    assert fresh.path != file.path
    assert list(fresh.adopted()) == []
    assert files(shared_memory) == [Path(fresh.path).name]


def test_another_engines_file_of_another_size_is_left_to_it(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    file.close()
    open_file(shared_memory, "b", sizing="other")
    _, again = open_file(shared_memory, "a")
    assert list(again.adopted()) == [(0, content(1))]


def test_files_of_other_layouts_are_not_read(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a", layout=LAYOUT._replace(name="other"))
    store(file, 0, 1)
    view, _ = open_file(shared_memory, "b")
    assert view.empty


def test_files_come_and_go(shared_memory: Path) -> None:
    view, own = open_file(shared_memory, "a")
    own.reserve(0)
    assert view.empty
    _, file = open_file(shared_memory, "b")
    store(file, 0, 1)
    assert not view.empty
    assert view.has(digest(1))
    os.unlink(file.path)
    time.sleep(0.02)
    assert view.empty


def test_a_file_that_takes_long_to_create_is_found(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines have listed the folder while the file was not complete."""
    view, own = open_file(shared_memory, "a")
    own.reserve(0)
    create = PoolFile.create

    def slowly(file: PoolFile, sizing: bytes) -> None:
        time.sleep(2 * SETTLED_SECONDS)
        assert view.empty
        assert view._peers is not None
        assert view._peers._seen != -1
        create(file, sizing)

    monkeypatch.setattr(PoolFile, "create", slowly)
    _, file = open_file(shared_memory, "b")
    store(file, 0, 1)
    assert not view.empty


def test_without_fetching_there_is_nothing_to_copy(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    view = PoolFolder(shared_memory, "b", ignore, fetch=False)
    view.open(LAYOUT, "", lambda: 4)
    assert view.empty
    assert not view.group


def test_only_dead_files_are_deleted(shared_memory: Path) -> None:
    view, own = open_file(shared_memory, "a")
    _, alive = open_file(shared_memory, "b")
    _, dead = open_file(shared_memory, "c")
    store(dead, 0, 1)
    own.reserve(0)
    assert not view.empty
    dead.close()
    view.delete_dead()
    assert files(shared_memory) == sorted(Path(file.path).name for file in (own, alive))
    # Also for those who have it open: otherwise its memory would stay occupied.
    assert view.copy(digest(1), 0) is None


def test_engines_of_one_folder_are_a_group(shared_memory: Path) -> None:
    (shared_memory / "other").mkdir(mode=0o700)
    first, second = (open_file(shared_memory, name)[0] for name in "ab")
    assert first.group == second.group
    assert first.group != open_file(shared_memory / "other", "a")[0].group
    assert first.group != open_file(shared_memory, "c", layout=LAYOUT._replace(name="other"))[0].group


def test_folders_that_must_not_be_used(shared_memory: Path, tmp_path: Path) -> None:
    open_to_others = shared_memory / "open"
    open_to_others.mkdir()
    open_to_others.chmod(0o755)
    with pytest.raises(ValueError, match="mode 700"):
        PoolFolder(open_to_others, "a", ignore)
    (shared_memory / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        PoolFolder(shared_memory / "link", "a", ignore)
    with pytest.raises(ValueError, match="No such file"):
        PoolFolder(shared_memory / "missing" / "folder", "a", ignore)


def test_a_folder_on_a_disk_is_refused(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_worker.pool_files.memory.is_in_memory", lambda folder: folder != shared_memory / "new")
    with pytest.raises(ValueError, match=r"must be in memory \(tmpfs\)"):
        PoolFolder(shared_memory / "new", "a", ignore)


def test_a_folder_of_another_user_is_refused(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become_another_user(monkeypatch)
    with pytest.raises(ValueError, match="must belong to this user"):
        PoolFolder(shared_memory, "a", ignore)


def test_only_this_user_can_read_the_files(shared_memory: Path) -> None:
    former = os.umask(0)
    try:
        _, file = open_file(shared_memory, "a")
    finally:
        os.umask(former)
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    assert stat.S_IMODE(Path(file.path).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602])
def test_a_file_that_others_can_open_is_neither_read_nor_adopted(shared_memory: Path, mode: int) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    Path(file.path).chmod(mode)
    view, _ = open_file(shared_memory, "b")
    assert view.empty
    file.close()
    _, fresh = open_file(shared_memory, "a")
    assert fresh.path != file.path
    assert not Path(file.path).exists()


def test_a_file_of_another_user_is_neither_read_nor_adopted(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, alive = open_file(shared_memory, "a")
    _, dead = open_file(shared_memory, "b")
    for file in (alive, dead):
        store(file, 0, 1)
    dead.close()
    view = PoolFolder(shared_memory, "c", ignore)
    become_another_user(monkeypatch)
    file = view.open(LAYOUT, "", lambda: 4)
    assert file is not None
    assert list(file.adopted()) == []
    assert view.empty
    assert len(files(shared_memory)) == 3


def become_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files so far are not this user's."""
    uid = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: uid + 1)
