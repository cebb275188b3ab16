import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.layout import HEADER, Places
from engine_worker.pool_files.peer_file import PeerFile
from engine_worker.pool_files.pool_file import PoolFile
from tests.engine_worker.pool_files.files import (
    LAYOUT,
    NUM_BLOCKS,
    content,
    digest,
    holds,
    open_file,
    pattern,
    store,
)

END = Places.of(LAYOUT, NUM_BLOCKS).parts[1] + NUM_BLOCKS * LAYOUT.parts[1]
"""Where the last block ends."""


def test_another_engine_copies_a_block(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 3, 7)
    view, other = open_file(shared_memory, "b")
    assert not view.empty
    assert view.has(digest(7))
    assert not view.has(digest(8))
    other.reserve(5)
    assert view.copy(digest(7), 5) == file.sum(3)
    assert holds(other, 5, 7)


def test_a_cleared_block_is_not_found(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    for number in range(4):
        store(file, number, number)
    view, other = open_file(shared_memory, "b")
    other.reserve(0)
    assert not view.empty
    file.clear(2)
    assert [view.has(digest(number)) for number in range(4)] == [True, True, False, True]
    assert view.copy(digest(2), 0) is None
    file.clear_all()
    assert not any(view.has(digest(number)) for number in range(4))


def test_a_block_that_its_owner_has_replaced_is_refused(shared_memory: Path) -> None:
    """Between the look-up and the copy, the block was given to other content."""
    _, file = open_file(shared_memory, "a")
    store(file, 3, 7)
    view, other = open_file(shared_memory, "b")
    other.reserve(0)
    assert not view.empty
    assert view._peers is not None
    [peer] = view._peers
    found = peer.find(digest(7))
    assert found is not None
    file.clear(3)
    store(file, 3, 8)
    assert not peer.copy(found, digest(7), other, 0)


def test_the_next_engine_adopts_what_is_whole(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    for block, number in enumerate((10, 11, 12)):
        store(file, block, number)
    file.parts[1][1, 100] ^= 1
    file.clear(2)
    file.close()
    _, adopted = open_file(shared_memory, "a")
    assert adopted.path == file.path
    assert list(adopted.adopted()) == [(0, content(10))]
    assert adopted.damaged == 1
    assert holds(adopted, 0, 10)
    # Nothing of other content is left: it may be no number.
    assert not any(part[1:].any() for part in adopted.parts)


def test_other_engines_find_blocks_while_they_are_adopted(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    for block, number in enumerate((10, 11, 12)):
        store(file, block, number)
    view, _ = open_file(shared_memory, "b")
    assert not view.empty
    file.close()
    _, adopted = open_file(shared_memory, "a")
    for _ in adopted.adopted():
        assert all(view.has(digest(number)) for number in (10, 11, 12))
    assert all(view.has(digest(number)) for number in (10, 11, 12))


def test_no_damage_of_an_entry_is_adopted(shared_memory: Path) -> None:
    """Every byte of a dead engine's entry in turn."""
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    file.close()
    entries, size = Places.of(LAYOUT, NUM_BLOCKS).entries, LAYOUT.entry.itemsize
    original = Path(file.path).read_bytes()
    for offset in range(size):
        raw = bytearray(original)
        raw[entries + offset] ^= 255
        Path(file.path).write_bytes(raw)
        _, file = open_file(shared_memory, "a")
        found = list(file.adopted())
        # The version and the flag say nothing about the content.
        assert found == ([(0, content(1))] if offset < 16 else [])
        file.clear(0)
        store(file, 0, 2)
        file.close()


def test_no_damage_of_the_header_prevents_a_start(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    file.close()
    original = Path(file.path).read_bytes()
    for offset in range(HEADER.itemsize):
        raw = bytearray(original)
        raw[offset] ^= 255
        damaged = Path(file.path)
        damaged.write_bytes(raw)
        damaged.chmod(0o600)
        _, file = open_file(shared_memory, "a")
        assert list(file.adopted()) == []
        file.close()


def test_no_damage_of_an_entry_yields_wrong_content(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    store(file, 1, 2)
    view, other = open_file(shared_memory, "b")
    other.reserve(0)
    assert not view.empty
    places, size = Places.of(LAYOUT, NUM_BLOCKS), LAYOUT.entry.itemsize
    with open(file.path, "r+b", buffering=0) as raw:
        for offset in range(2 * size):
            original = os.pread(raw.fileno(), 1, places.entries + offset)
            for flipped in (original[0] ^ 1, original[0] ^ 255):
                os.pwrite(raw.fileno(), bytes([flipped]), places.entries + offset)
                for number in (1, 2):
                    other.parts[0][0] = 0
                    assert view.copy(digest(number), 0) is None or holds(other, 0, number)
            os.pwrite(raw.fileno(), original, places.entries + offset)


def test_damaged_bytes_are_refused(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    view, other = open_file(shared_memory, "b")
    other.reserve(0)
    assert not view.empty
    for part, offset in ((0, 0), (0, 4095), (1, 0), (1, 199)):
        file.parts[part][0, offset] ^= 64
        assert view.copy(digest(1), 0) is None
        # Nothing of it is left: it may be no number, and attention reads slots that nobody has written.
        assert not any(part[0].any() for part in other.parts)
        file.parts[part][0, offset] ^= 64
    assert view.copy(digest(1), 0) is not None


def test_a_block_that_is_damaged_in_one_file_is_copied_from_another(shared_memory: Path) -> None:
    for name in "ab":
        _, file = open_file(shared_memory, name)
        store(file, 0, 1)
        if name == "a":
            file.parts[0][0, 5] ^= 1
    view, other = open_file(shared_memory, "c")
    other.reserve(0)
    assert not view.empty
    assert view.copy(digest(1), 0) is not None
    assert holds(other, 0, 1)


@pytest.mark.parametrize("damage", [b"\0" * 8, b"\xff" * 8, (1 << 40).to_bytes(8, "little")])
def test_a_damaged_number_of_blocks_is_a_miss(shared_memory: Path, damage: bytes) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    with open(file.path, "r+b", buffering=0) as raw:
        os.pwrite(raw.fileno(), damage, HEADER.fields["num_blocks"][1])
    view, other = open_file(shared_memory, "b")
    other.reserve(0)
    assert view.empty
    assert not view.has(digest(1))
    assert view.copy(digest(1), 0) is None
    file.close()
    _, fresh = open_file(shared_memory, "a")
    assert fresh.path != file.path


@pytest.mark.parametrize("size", [0, 10, 4096, 5000, 40000, END - 1])
def test_a_truncated_file_is_a_miss(shared_memory: Path, size: int) -> None:
    """Truncated before it is opened, and while it is open."""
    _, file = open_file(shared_memory, "a")
    store(file, NUM_BLOCKS - 1, 1)
    view, other = open_file(shared_memory, "b")
    other.reserve(0)
    assert not view.empty
    os.truncate(file.path, size)
    assert view.copy(digest(1), 0) is None
    late, own = open_file(shared_memory, "c")
    own.reserve(0)
    assert late.empty or late.copy(digest(1), 0) is None
    file.close()
    _, fresh = open_file(shared_memory, "a")
    assert list(fresh.adopted()) == []


def test_foreign_files_are_not_read(shared_memory: Path) -> None:
    view, own = open_file(shared_memory, "a")
    own.reserve(0)
    folder = Path(own.path).parent
    (folder / "empty.pool").touch()
    (folder / "text.pool").write_bytes(b"no pool file" * 1000)
    (folder / "link.pool").symlink_to("/etc/passwd")
    (folder / "folder.pool").mkdir()
    assert view.empty
    # They are not adopted either.
    _, other = open_file(shared_memory, "b")
    assert list(other.adopted()) == []


def test_an_overwritten_block_is_copied_whole_or_not_at_all(shared_memory: Path) -> None:
    """The owner overwrites its blocks without pause, in another process."""
    view, own = open_file(shared_memory, "reader")
    own.reserve(0)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.engine_worker.pool_files.overwrite", str(shared_memory)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            accepted = 0
            for attempt in range(4000):
                number = attempt % 8
                if not view.empty and view.copy(digest(number), 0) is not None:
                    assert holds(own, 0, number)
                    accepted += 1
        finally:
            process.kill()
    assert accepted


def test_without_memory_the_remaining_blocks_are_private(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []
    view = PoolFolder(shared_memory, "a", reasons.append)
    monkeypatch.setattr("engine_worker.pool_files.pool_file.RESERVE_BYTES", LAYOUT.block_bytes * 4)
    file = view.open(LAYOUT, "", lambda: NUM_BLOCKS)
    assert file is not None
    store(file, 0, 1)
    monkeypatch.setattr(PoolFile, "_check_room", fail)
    for block in range(1, NUM_BLOCKS):
        store(file, block, block + 1)
    assert all(holds(file, block, block + 1) for block in range(NUM_BLOCKS))
    assert reasons == ["[Errno 28] no room: 4 of 16 blocks are in the file"]
    other, own = open_file(shared_memory, "b")
    own.reserve(0)
    assert not other.empty
    assert [other.has(digest(block + 1)) for block in range(NUM_BLOCKS)] == [True] * 4 + [False] * 12


def test_without_room_for_the_index_the_memory_is_private(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []
    monkeypatch.setattr("os.posix_fallocate", fail)
    assert PoolFolder(shared_memory, "a", reasons.append).open(LAYOUT, "", lambda: NUM_BLOCKS) is None
    [reason] = reasons
    assert reason.startswith(f"[Errno 28] no room: '{shared_memory}/")
    assert not list(shared_memory.glob("*/*.pool"))


@pytest.mark.parametrize("small_memory", ["256k"], indirect=True)
def test_a_full_file_system_ends_nothing(small_memory: Path) -> None:
    reasons: list[str] = []
    file = PoolFolder(small_memory, "a", reasons.append).open(LAYOUT, "", lambda: 200)
    assert file is not None
    for block in range(200):
        store(file, block, block)
    assert all(holds(file, block, block) for block in range(200))
    assert len(reasons) == 1


def fail(*_: object) -> None:
    raise OSError(28, "no room")


def parts_of(number: int) -> bytes:
    """The parts of content `number`, one after the other."""
    return b"".join(pattern(number, part).tobytes() for part in range(len(LAYOUT.parts)))


def test_a_block_that_comes_from_elsewhere_is_written_and_verified(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    file.reserve(1)
    assert file.write(1, memoryview(parts_of(1)), file.sum(0))
    assert holds(file, 1, 1)
    assert not file.write(1, parts_of(2), file.sum(0))
    assert not file.write(1, parts_of(1)[:-1], file.sum(0))
    assert not file.write(1, parts_of(1) + b"x", file.sum(0))


def test_a_block_is_read_whole(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 3, 1)
    peer = PeerFile(file.path, LAYOUT)
    found = peer.find(digest(1))
    assert found is not None
    assert peer.read(found, digest(1)) == parts_of(1)
    # Replaced meanwhile, even by the same.
    file.clear(3)
    store(file, 3, 1)
    assert peer.read(found, digest(1)) is None
    os.truncate(file.path, 8192)
    assert peer.read(found, digest(1)) is None


def test_all_entries_are_read_at_once(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 3, 1)
    entries = PeerFile(file.path, LAYOUT).entries()
    assert len(entries) == NUM_BLOCKS
    assert np.flatnonzero(entries["valid"]).tolist() == [3]
    assert entries["hash"][3].tobytes() == digest(1)
