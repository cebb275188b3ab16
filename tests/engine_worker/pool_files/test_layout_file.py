from pathlib import Path

import pytest

from engine_worker.pool_files.layout_file import LAYOUT_FILE, read_layout, write_layout
from tests.engine_worker.pool_files.files import LAYOUT, open_file


def test_the_layout_is_next_to_the_files(shared_memory: Path) -> None:
    open_file(shared_memory, "a")
    open_file(shared_memory, "b")
    folder = shared_memory / LAYOUT.folder
    assert read_layout(folder) == LAYOUT
    assert [path.name for path in folder.glob("layout*")] == [LAYOUT_FILE]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[",
        b"{}",
        b'["test",4,[4096],false]',
        b'["test","4",[4096,200],false]',
        b'["another version",4,[4096,200],false]',
    ],
)
def test_a_layout_that_is_not_the_folders_is_none_and_replaced(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / LAYOUT.folder
    folder.mkdir()
    assert read_layout(folder) is None
    (folder / LAYOUT_FILE).write_bytes(content)
    assert read_layout(folder) is None
    write_layout(folder, LAYOUT)
    assert read_layout(folder) == LAYOUT
