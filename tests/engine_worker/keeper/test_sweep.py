import os
from pathlib import Path
from typing import Any

import pytest

from engine_worker.keeper import sweep as sweeps
from engine_worker.keeper.disk import HEADER, DiskTier
from engine_worker.keeper.memory import StoredBlock
from engine_worker.keeper.sweep import Sweep
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.layout_file import LAYOUT_FILE
from engine_worker.step import Content
from tests.engine_worker.keeper.keepers import DISK_BYTES, stored
from tests.engine_worker.pool_files.files import LAYOUT, NUM_BLOCKS, digest, fill, open_file, store

LONG = 4
"""Blocks of the shortest long prefix. In tests, contents 0, 1, 2… are one chain."""


class Machine:
    """One engine's file, and a sweep that has run once."""

    def __init__(self, folder: Path, disk_folder: Path, max_bytes: int = DISK_BYTES) -> None:
        _, self.file = open_file(folder, "a")
        self.disk = DiskTier(disk_folder, max_bytes)
        self.sweep = Sweep(folder, self.disk, max_bytes)

    def fill(self, *numbers: int) -> None:
        for number in numbers:
            self.file.clear(number)
            store(self.file, number, number)

    def sweep_twice(self) -> None:
        self.sweep.sweep()
        self.sweep.sweep()

    @property
    def on_disk(self) -> list[int]:
        return [number for number in range(NUM_BLOCKS) if self.disk.has(LAYOUT, digest(number))]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "LONG_PREFIX_TOKENS", LONG * LAYOUT.tokens_per_block)


@pytest.fixture
def machine(shared_memory: Path, disk_folder: Path) -> Machine:
    return Machine(shared_memory, disk_folder)


def test_long_prefixes_are_copied(machine: Machine) -> None:
    machine.fill(*range(LONG + 1))
    machine.sweep_twice()
    assert machine.on_disk == list(range(LONG + 1))
    for number in range(LONG + 1):
        assert machine.disk.read(LAYOUT, digest(number)) == stored(number)


def test_short_prefixes_are_not(machine: Machine) -> None:
    machine.fill(*range(LONG - 1))
    machine.sweep_twice()
    assert machine.on_disk == []


@pytest.mark.parametrize("missing", [0, 2])
def test_prefixes_with_a_hole_are_not(machine: Machine, missing: int) -> None:
    """What is left before the hole is short."""
    machine.fill(*(number for number in range(LONG + 6) if number != missing))
    machine.sweep_twice()
    assert machine.on_disk == []


def test_what_is_new_waits_for_the_next_sweep(machine: Machine) -> None:
    machine.fill(*range(LONG))
    machine.sweep.sweep()
    assert machine.on_disk == []
    machine.fill(LONG)
    machine.sweep.sweep()
    assert machine.on_disk == list(range(LONG))
    machine.sweep.sweep()
    assert machine.on_disk == list(range(LONG + 1))


def test_a_chain_may_be_in_several_files(machine: Machine, shared_memory: Path) -> None:
    machine.fill(0, 1)
    _, other = open_file(shared_memory, "b")
    for number in range(1, LONG):
        store(other, number, number)
    machine.sweep_twice()
    assert machine.on_disk == list(range(LONG))


def test_other_layouts_are_copied_too(machine: Machine, shared_memory: Path) -> None:
    layout = Layout("larger blocks", LONG * LAYOUT.tokens_per_block, LAYOUT.parts)
    _, file = open_file(shared_memory, "b", layout=layout)
    file.reserve(0)
    fill(file, 0, 0)
    file.put(0, Content(digest(0), (0,) * layout.tokens_per_block, None, ""))
    machine.sweep_twice()
    assert machine.disk.has(layout, digest(0))


@pytest.mark.parametrize("content", [None, b"", b"{}", b'["another",4,[4096,200],false]'])
def test_folders_without_their_layout_are_left_out(
    machine: Machine, shared_memory: Path, content: bytes | None
) -> None:
    machine.fill(*range(LONG))
    file = shared_memory / LAYOUT.folder / LAYOUT_FILE
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    (shared_memory / "stray").write_bytes(b"")
    machine.sweep_twice()
    assert machine.on_disk == []


def test_a_damaged_block_ends_its_chain(machine: Machine) -> None:
    machine.fill(*range(LONG + 2))
    fill(machine.file, LONG, 0)
    machine.sweep_twice()
    assert machine.on_disk == list(range(LONG))
    machine.fill(LONG)
    machine.sweep_twice()
    assert machine.on_disk == list(range(LONG + 2))


def test_a_damaged_entry_ends_its_chain(machine: Machine) -> None:
    machine.fill(*range(LONG + 1))
    machine.file._entries["tokens"][LONG - 1] += 1
    machine.sweep_twice()
    assert machine.on_disk == list(range(LONG - 1))


def test_a_block_that_is_replaced_while_it_is_copied_is_not_written(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fill(*range(LONG))
    read = sweeps._read

    def replace_first(layout: Layout, block: bytes, entry: Any) -> StoredBlock | None:
        machine.file.clear(2)
        store(machine.file, 2, 12)
        return read(layout, block, entry)

    machine.sweep.sweep()
    monkeypatch.setattr(sweeps, "_read", replace_first)
    machine.sweep.sweep()
    assert machine.on_disk == [0, 1]


def test_a_drop_in_a_sweep_ends_it_and_nothing_is_written_afterwards(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fill(*range(LONG + 2))
    read = sweeps._read

    def drop_at_third(layout: Layout, block: bytes, entry: Any) -> StoredBlock | None:
        content = read(layout, block, entry)
        if block == digest(2):
            machine.disk.drop()
        return content

    machine.sweep.sweep()
    monkeypatch.setattr(sweeps, "_read", drop_at_third)
    machine.sweep.sweep()
    assert machine.on_disk == []
    monkeypatch.undo()
    monkeypatch.setattr(sweeps, "LONG_PREFIX_TOKENS", LONG * LAYOUT.tokens_per_block)
    # The engines clear their entries, too, and what they compute afterwards is copied.
    machine.file.clear_all()
    machine.sweep_twice()
    assert machine.on_disk == []
    machine.fill(*range(LONG))
    machine.sweep_twice()
    assert machine.on_disk == list(range(LONG))


def test_what_the_disk_has_evicted_is_not_written_again(shared_memory: Path, disk_folder: Path) -> None:
    """More is in memory than there is room on the disk."""
    size = HEADER.size + LAYOUT.block_bytes
    machine = Machine(shared_memory, disk_folder, 6 * size)
    machine.fill(*range(8))
    for _ in range(5):
        machine.sweep.sweep()
    on_disk = machine.on_disk
    # The beginning stays.
    assert len(on_disk) <= 6
    assert 0 in on_disk
    written = machine.disk.generation, sorted(path.stat().st_ino for path in disk_folder.glob("*/*"))
    for _ in range(5):
        machine.sweep.sweep()
    assert written == (machine.disk.generation, sorted(path.stat().st_ino for path in disk_folder.glob("*/*")))


def test_a_restarted_keeper_writes_only_what_is_missing(
    machine: Machine, shared_memory: Path, disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fill(*range(LONG))
    machine.sweep_twice()
    machine.disk.close()
    disk = DiskTier(disk_folder, DISK_BYTES)
    machine.fill(LONG)
    written = list[bytes]()
    write = DiskTier.write

    def note(disk: DiskTier, layout: Layout, block: bytes, *arguments: Any) -> bool:
        written.append(block)
        return write(disk, layout, block, *arguments)

    monkeypatch.setattr(DiskTier, "write", note)
    sweep = Sweep(shared_memory, disk, DISK_BYTES)
    sweep.sweep()
    sweep.sweep()
    assert written == [digest(LONG)]


def test_files_that_have_not_changed_are_not_looked_through(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    chains = Sweep._chains

    def count(*arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return chains(*arguments)

    monkeypatch.setattr(Sweep, "_chains", count)
    machine.fill(*range(LONG))
    for _ in range(6):
        machine.sweep.sweep()
    # New, copied, and nothing left.
    assert looked == 3
    machine.fill(LONG)
    machine.sweep_twice()
    assert machine.on_disk == list(range(LONG + 1))
    assert looked == 5


def test_what_could_not_be_written_is_tried_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.fill(*range(LONG))
    monkeypatch.setattr(DiskTier, "write", lambda *_: False)
    for _ in range(4):
        machine.sweep.sweep()
    monkeypatch.undo()
    monkeypatch.setattr(sweeps, "LONG_PREFIX_TOKENS", LONG * LAYOUT.tokens_per_block)
    machine.sweep.sweep()
    assert machine.on_disk == list(range(LONG))


def test_the_thread_survives_what_goes_wrong(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps_left = 3

    def fail() -> None:
        nonlocal sweeps_left
        sweeps_left -= 1
        if not sweeps_left:
            machine.sweep.stop()
        raise ValueError("unexpected")

    monkeypatch.setattr(machine.sweep, "sweep", fail)
    monkeypatch.setattr(sweeps, "SWEEP_SECONDS", 0.001)
    machine.sweep.run()
    assert not sweeps_left


def test_a_file_that_is_truncated_meanwhile_ends_nothing(machine: Machine) -> None:
    machine.fill(*range(LONG))
    machine.sweep.sweep()
    os.truncate(machine.file.path, 8192)
    machine.sweep.sweep()
    assert machine.on_disk == []
