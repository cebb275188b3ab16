"""Small pool files with recognizable content."""

from pathlib import Path

import numpy as np

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Content

LAYOUT = Layout("test", 4, (4096, 200))
"""The second part is not a multiple of a page: its blocks share pages."""
NUM_BLOCKS = 16


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int) -> Content:
    parent = digest(number - 1) if number else None
    return Content(digest(number), (number, 1, 2, 3), parent, "a" * 32 if number % 2 else "")


def fill(file: PoolFile, block: int, number: int) -> None:
    """Write the bytes of content `number`."""
    for index, part in enumerate(file.parts):
        part[block] = pattern(number, index)


def pattern(number: int, part: int) -> np.ndarray:
    return np.random.default_rng((number, part)).integers(0, 256, LAYOUT.parts[part], np.uint8)


def holds(file: PoolFile, block: int, number: int) -> bool:
    """Whether a block has the bytes of content `number`."""
    return all(np.array_equal(part[block], pattern(number, index)) for index, part in enumerate(file.parts))


def store(file: PoolFile, block: int, number: int) -> None:
    file.reserve(block)
    fill(file, block, number)
    file.put(block, content(number))


def open_file(folder: Path, name: str, *, sizing: object = "", layout: Layout = LAYOUT) -> tuple[PoolFolder, PoolFile]:
    """An engine's view of the folder, and its own file."""
    view = PoolFolder(folder, name, ignore)
    file = view.open(layout, sizing, lambda: NUM_BLOCKS)
    if file is None:
        raise AssertionError("the file was not opened")
    return view, file


def check_separate(folder: Path, layout: Layout, other: Layout) -> None:
    """Engines with the other layout neither read nor adopt what an engine with this layout has stored."""
    _, file = open_file(folder, "a", layout=layout)
    file.reserve(0)
    file.put(0, Content(digest(1), (1,) * layout.tokens_per_block, None, ""))
    view, _ = open_file(folder, "b", layout=other)
    assert view.empty
    file.close()
    assert not list(open_file(folder, "c", layout=other)[1].adopted())
    assert list(open_file(folder, "d", layout=layout)[1].adopted())


def ignore(_reason: str) -> None:
    pass
