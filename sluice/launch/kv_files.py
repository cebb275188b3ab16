"""Files of KV caches in memory: whether there is room for them, and deletion of those that no engine will take over.

An engine holds the lock (flock) of its file as long as it lives, see docs/kv_cache.md.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path

from sluice.host.memory_files import is_in_memory
from sluice.settings.engine import PRIVATE_MEMORY
from sluice.settings.services import EngineSettings

SUFFIX = ".pool"
MIN_SIZE = 1 << 30
"""Smallest tmpfs to use, in bytes. Docker's /dev/shm has 64 MiB."""
MIN_FREE = 256 << 20
MIN_FREE_SHARE = 4
"""At least a fourth of the tmpfs must be free: otherwise other programs fill it."""


def why_private(settings: EngineSettings, folder: Path) -> str:
    """Why the KV caches of engines with these settings cannot be files below `folder`. Empty if they can."""
    if settings.kv_folder is not None:
        return f"kv_folder is {PRIVATE_MEMORY}" if settings.kv_folder == PRIVATE_MEMORY else "kv_folder is set"
    if settings.tensor_parallel > 1:
        return f"tensor_parallel is {settings.tensor_parallel}"
    if settings.device == "cuda" and not settings.kv_host_memory:
        return "device is cuda, without kv_host_memory"
    return no_room(folder)


def no_room(folder: Path) -> str:
    """Why there is no room for KV caches in `folder`. Empty if there is."""
    if not is_in_memory(folder):
        return f"{folder} is not a tmpfs"
    space = os.statvfs(folder)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    if size < MIN_SIZE:
        return f"{folder} has {_mib(size)}, less than {_mib(MIN_SIZE)}"
    least = max(MIN_FREE, size // MIN_FREE_SHARE)
    if free < least:
        return f"{folder} has {_mib(free)} free of {_mib(size)}, less than {_mib(least)}"
    return ""


def delete_files(folder: Path, engine: str) -> None:
    """Delete the engine's files, except one that a living process has locked."""
    for file in _files(folder, engine):
        # The file is in use, or another engine has taken it over and renamed it.
        with suppress(OSError):
            _delete_if_unused(file)


def _files(folder: Path, engine: str) -> Iterator[Path]:
    """The engine's files LAYOUT/ENGINE.NUMBER.pool, of every layout."""
    name = f"{engine}."
    for file in folder.glob(f"*/{escape(name)}*{SUFFIX}"):
        # The name of another engine may begin with this one's name and a dot.
        if "." not in file.name.removeprefix(name).removesuffix(SUFFIX):
            yield file


def _delete_if_unused(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Engines that have copied from the file keep it open: unlinking alone would not free its memory.
        os.ftruncate(descriptor, 0)
        file.unlink()
    finally:
        os.close(descriptor)


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
