"""Engines with and without pool files: their settings, and what is left of the files in memory."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from sluice.launch import Ring

OFF, ON = "off", "on"
SIDES: Mapping[str, str] = {OFF: "without pool files", ON: "with pool files"}
NOT_USED = "**The engines had no pool files**: this version has none, or /dev/shm has no room for them."
MEMORY = Path("/dev/shm")  # noqa: S108
NONE = "none"
FLAG, VARIABLE, LAUNCHER_FLAG = "--kv-folder", "SLUICE_ENGINE_KV_FOLDER", "--default-kv-folder"


def engine_args(files: bool) -> dict[str, Any]:
    """Settings of a ring's engines. A ring chooses the folder itself, unless the setting is given."""
    return {} if files else {"kv_folder": NONE}


def folders(ring: Ring) -> set[Path]:
    """The folders of the engines' pool files, from their command lines and environments. Empty without pool files."""
    found = set()
    for child in ring.children.values():
        if child.role == "engine":
            process = Path(f"/proc/{child.pid}")
            flags = dict(pairwise((process / "cmdline").read_text().split("\0")))
            environment = dict(line.partition("=")[::2] for line in (process / "environ").read_text().split("\0"))
            found.add(flags.get(FLAG) or environment.get(VARIABLE) or flags.get(LAUNCHER_FLAG) or NONE)
    return {Path(folder) for folder in found - {NONE}}


def left(folders: Iterable[Path]) -> list[Path]:
    """Folders that still exist, and everything below them."""
    return sorted(path for folder in folders if folder.exists() for path in (folder, *folder.rglob("*")))
