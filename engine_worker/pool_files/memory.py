"""Where files in memory are, and what replaces their memory when it runs out."""

import ctypes
import mmap
import os
import stat
from pathlib import Path

from sluice.host.memory_files import is_in_memory

MAP_FIXED = 0x10


def check_folder(folder: Path) -> None:
    """Create the folder if it is missing. Raises ValueError unless it is in memory and only this user can enter it."""
    check_private(folder, "kv_folder")
    if not is_in_memory(folder):
        raise ValueError(f"kv_folder: {folder} must be in memory (tmpfs), such as in /dev/shm")


def check_private(folder: Path, setting: str) -> None:
    """Create the folder if it is missing. Raises ValueError unless only this user can enter it: KV blocks are the text
    of prompts."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ValueError(f"{setting}: {error}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{setting}: {folder} is not a folder")
    if not is_private(status):
        raise ValueError(f"{setting}: {folder} must belong to this user, and others must have no access (mode 700)")


def is_private(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and others have no access."""
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def replace_by_private(region: mmap.mmap, start: int, size: int) -> None:
    """Replace pages of a mapping by zeroed private memory at the same addresses, which no file system limits. Raises
    OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region)) + start
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    if libc.mmap(address, size, protection, flags, -1, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
