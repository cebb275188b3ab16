"""Whether files of a folder are in memory."""

import os
from pathlib import Path


def is_in_memory(folder: Path, root: Path = Path("/")) -> bool:
    """Whether the folder is on a tmpfs, according to proc_pid_mountinfo(5). False on systems without /proc, and if the
    folder does not exist. `root`: root of the file system, for tests."""
    mounts = root / "proc/self/mountinfo"
    if not (mounts.is_file() and folder.is_dir()):
        return False
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = (line.partition(" - ") for line in mounts.read_text().splitlines())
    # A file system may be mounted several times; its type is the same each time.
    return any(mount.split()[2] == number and kind.split()[0] == "tmpfs" for mount, _, kind in lines)
