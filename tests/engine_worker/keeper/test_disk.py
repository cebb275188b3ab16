import os
from pathlib import Path

import pytest

from engine_worker.keeper import disk as disks
from engine_worker.keeper.disk import HEADER, DiskTier
from engine_worker.pool_files.layout import Layout
from tests.engine_worker.keeper.keepers import digests, stored
from tests.engine_worker.pool_files.files import LAYOUT, digest

FILE_BYTES = HEADER.size + LAYOUT.block_bytes


def tier(folder: Path, blocks: int = 100) -> DiskTier:
    return DiskTier(folder, blocks * FILE_BYTES)


def write(disk: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert disk.write(LAYOUT, digest(number), stored(number), disk.generation)


def there(disk: DiskTier) -> list[int]:
    return [number for number in range(10) if disk.has(LAYOUT, digest(number))]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.block"))


def test_a_block_is_read_as_it_was_written(disk_folder: Path) -> None:
    disk = tier(disk_folder)
    write(disk, 1)
    assert disk.read(LAYOUT, digest(1)) == stored(1)
    assert disk.read(LAYOUT, digest(2)) is None
    assert disk.read(LAYOUT._replace(name="other"), digest(1)) is None
    assert (disk.num_blocks, disk.num_bytes) == (1, FILE_BYTES)
    assert files(disk_folder)[0].stat().st_size == FILE_BYTES
    assert not files(disk_folder)[0].stat().st_mode & 0o077


def test_a_block_that_is_written_twice_counts_once(disk_folder: Path) -> None:
    disk = tier(disk_folder)
    write(disk, 1, 1)
    assert (disk.num_blocks, disk.num_bytes) == (1, FILE_BYTES)
    assert disk.read(LAYOUT, digest(1)) == stored(1)


def test_the_block_that_was_not_used_for_longest_is_evicted(disk_folder: Path) -> None:
    disk = tier(disk_folder, 3)
    write(disk, 1, 2, 3)
    assert disk.read(LAYOUT, digest(1)) is not None
    write(disk, 4)
    assert there(disk) == [1, 3, 4]
    assert len(files(disk_folder)) == 3


def test_a_chain_is_evicted_from_its_end(disk_folder: Path) -> None:
    """Also after it was found and read, from its beginning."""
    disk = tier(disk_folder, 4)
    write(disk, 1, 2, 3, 4)
    disk.use(LAYOUT, digests([1, 2, 3]))
    for number in (1, 2, 3):
        assert disk.read(LAYOUT, digest(number)) is not None
    write(disk, 5, 6)
    assert there(disk) == [1, 2, 5, 6]


def test_a_restart_keeps_the_blocks_and_their_order(disk_folder: Path) -> None:
    disk = tier(disk_folder)
    write(disk, 1, 2, 3, 4)
    disk.use(LAYOUT, digests([1, 2, 3]))
    (disk_folder / f"{'0' * 16}.new").write_bytes(b"left by a crash")
    (disk_folder / LAYOUT.folder / "notes.block").write_bytes(b"no hash")
    disk.close()
    disk = tier(disk_folder, 3)
    assert there(disk) == [1, 2, 3]
    assert not list(disk_folder.glob("*.new"))
    assert disk.num_bytes == 3 * FILE_BYTES
    write(disk, 5)
    assert there(disk) == [1, 2, 5]


@pytest.mark.parametrize("at", [0, 8, 12, 16, HEADER.size, FILE_BYTES - 1])
def test_a_damaged_block_is_missing_and_deleted(disk_folder: Path, at: int) -> None:
    disk = tier(disk_folder)
    write(disk, 1)
    [file] = files(disk_folder)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert disk.read(LAYOUT, digest(1)) is None
    assert not file.exists()
    assert (disk.damaged, disk.num_blocks, disk.num_bytes) == (1, 0, 0)


@pytest.mark.parametrize("size", [0, 3, HEADER.size, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_size_is_missing_and_deleted(disk_folder: Path, size: int) -> None:
    disk = tier(disk_folder)
    write(disk, 1)
    [file] = files(disk_folder)
    os.truncate(file, size)
    assert disk.read(LAYOUT, digest(1)) is None
    assert not file.exists()


def test_a_file_that_has_gone_is_missing(disk_folder: Path) -> None:
    disk = tier(disk_folder)
    write(disk, 1)
    files(disk_folder)[0].unlink()
    assert disk.read(LAYOUT, digest(1)) is None
    assert disk.num_blocks == 0


def test_a_full_disk_stores_nothing_and_ends_nothing(disk_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(disk_folder)
    write(disk, 1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disks, "crc32", fail)
    assert not disk.write(LAYOUT, digest(2), stored(2), disk.generation)
    assert there(disk) == [1]
    assert not list(disk_folder.glob("*.new"))
    monkeypatch.undo()
    write(disk, 2)


def test_a_block_larger_than_the_disk_is_not_stored(disk_folder: Path) -> None:
    disk = DiskTier(disk_folder, FILE_BYTES - 1)
    assert not disk.write(LAYOUT, digest(1), stored(1), disk.generation)


def test_a_drop_deletes_everything_and_refuses_what_began_before_it(disk_folder: Path) -> None:
    disk = tier(disk_folder)
    write(disk, 1, 2)
    before = disk.generation
    disk.drop()
    assert not disk.write(LAYOUT, digest(3), stored(3), before)
    assert there(disk) == []
    assert disk.num_bytes == 0
    write(disk, 4)
    disk.clean()
    assert len(files(disk_folder)) == 1
    assert [path.name for path in disk_folder.iterdir()] == [LAYOUT.folder]


def test_what_was_dropped_is_not_there_after_a_restart(disk_folder: Path) -> None:
    disk = tier(disk_folder)
    write(disk, 1, 2)
    disk.drop()
    disk.close()
    assert there(tier(disk_folder)) == []


FOREIGN = (
    "mine/a.block",
    "mine.dropped/a",
    "a.new",
    "0123456789ABCDEF/a",
    "0123456789abcdef0/a",
    "0123456789abcdef.dropped/a",
    "0123456789abcdef.new/a",
    "0123456789abcdef/notes.block",
)


def test_what_the_user_has_in_the_folder_stays(disk_folder: Path) -> None:
    for name in FOREIGN:
        (disk_folder / name).parent.mkdir(exist_ok=True)
        (disk_folder / name).write_bytes(b"")
    disk = tier(disk_folder)
    write(disk, 1)
    assert disk.drop()
    disk.clean()
    disk.close()
    disk = tier(disk_folder)
    assert there(disk) == []
    for name in FOREIGN[:-1]:
        assert (disk_folder / name).exists()
    # Its folder had the name of a layout.
    assert len(list(disk_folder.glob("*/notes.block"))) == 1


@pytest.mark.parametrize("method", ["rename", "iterdir"])
def test_a_drop_that_fails_says_so_and_nothing_is_served(
    disk_folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tier(disk_folder)
    write(disk, 1)
    monkeypatch.setattr(Path, method, fail_to_access)
    assert not disk.drop()
    assert disk.read(LAYOUT, digest(1)) is None
    assert there(disk) == []
    monkeypatch.undo()
    assert disk.drop()
    assert files(disk_folder)[0].parent.suffix == ".dropped"


def fail_to_access(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_block_that_cannot_be_read_now_may_be_read_later(disk_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(disk_folder)
    write(disk, 1)
    monkeypatch.setattr(Path, "read_bytes", fail_to_access)
    assert disk.read(LAYOUT, digest(1)) is None
    monkeypatch.undo()
    assert disk.read(LAYOUT, digest(1)) == stored(1)
    assert disk.damaged == 0


def test_a_block_that_is_replaced_while_it_is_read_is_not_damaged(
    disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tier(disk_folder)
    write(disk, 1)

    def replace(path: Path) -> bytes:
        write(disk, 1)
        return b"cut off"

    monkeypatch.setattr(Path, "read_bytes", replace)
    assert disk.read(LAYOUT, digest(1)) is None
    monkeypatch.undo()
    assert disk.read(LAYOUT, digest(1)) == stored(1)
    assert disk.damaged == 0


@pytest.mark.parametrize(("layout", "number"), [(LAYOUT, 2), (LAYOUT._replace(name="other"), 1)])
def test_a_file_under_another_name_is_damaged(disk_folder: Path, layout: Layout, number: int) -> None:
    disk = tier(disk_folder)
    write(disk, 1)
    disk.close()
    target = disk_folder / layout.folder / f"{digest(number).hex()}.block"
    target.parent.mkdir(exist_ok=True)
    files(disk_folder)[0].rename(target)
    disk = tier(disk_folder)
    assert disk.has(layout, digest(number))
    assert disk.read(layout, digest(number)) is None
    assert disk.damaged == 1
    assert not target.exists()


def test_a_disk_that_fails_at_the_start_is_not_locked(disk_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "iterdir", fail_to_access)
    with pytest.raises(OSError, match="Input/output error"):
        tier(disk_folder)
    monkeypatch.undo()
    tier(disk_folder)


def test_a_folder_that_others_can_enter_is_refused(disk_folder: Path) -> None:
    disk_folder.chmod(0o750)
    with pytest.raises(ValueError, match=r"disk_folder: .* others must have no access"):
        tier(disk_folder)


def test_two_keepers_never_use_one_folder(disk_folder: Path) -> None:
    disk = tier(disk_folder)
    with pytest.raises(ValueError, match="another keeper uses"):
        tier(disk_folder)
    disk.close()
    tier(disk_folder)
