"""The layout of a folder's pool files, written next to them for those who know only the folder."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from engine_worker.pool_files.layout import Layout

LAYOUT_FILE: Final = "layout.json"


def write_layout(folder: Path, layout: Layout) -> None:
    """Does nothing if it is there. Raises OSError."""
    if read_layout(folder) is None:
        # Not one name for all: several engines may start at the same time.
        temporary = folder / f"{LAYOUT_FILE}.{os.urandom(4).hex()}"
        try:
            temporary.write_bytes(msgspec.json.encode(layout))
            temporary.replace(folder / LAYOUT_FILE)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def read_layout(folder: Path) -> Layout | None:
    """None if it is missing, damaged, or not that of this folder."""
    with suppress(OSError, msgspec.MsgspecError):
        layout = msgspec.json.decode((folder / LAYOUT_FILE).read_bytes(), type=Layout)
        return layout if layout.folder == folder.name else None
    return None
