"""Files that others may read, or that a signal may cut off, at any time."""

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Replace the file in one piece: it holds the former text or all of this one, never a part."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
