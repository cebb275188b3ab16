"""The private folders of a ring: one for its sockets and status files, and one in memory for its KV caches."""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "sluice-"
LOCK = "launcher"
SHORT_TEMP = "/tmp"  # noqa: S108
SHARED_MEMORY = "/dev/shm"  # noqa: S108
MAX_FOLDER_LENGTH = 80
"""In bytes. The path of an ipc socket in the folder may have about 107 bytes, on macOS 103."""


class Folder:
    """A folder that only this user can enter. It is stale once no process holds `lock`, which the children inherit.

    `parent`: the folder to create it in. Default: one for temporary files. Raises OSError if it cannot be created.
    """

    def __init__(self, parent: str | None = None) -> None:
        self.path = _make() if parent is None else Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # A lock instead of a pid file, because a pid may be reused, or belong to another container with the same /tmp.
        new_file = self.path / f"{LOCK}.new"
        self.lock = os.open(new_file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        os.write(self.lock, b"%d\n" % os.getpid())
        # Renamed after locking, so that no process can see the file LOCK unlocked.
        new_file.rename(self.path / LOCK)
        self._removed = False

    def remove(self) -> None:
        """Remove the folder and release its lock. Idempotent."""
        if not self._removed:
            self._removed = True
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)


def remove_stale() -> None:
    """Remove the folders of this user's launchers that were killed, if their children have exited too."""
    for parent in {Path(tempfile.gettempdir()), Path(SHORT_TEMP), Path(SHARED_MEMORY)}:
        for path in parent.glob(f"{PREFIX}*"):
            # The folder may belong to another user, be in use, or have been removed meanwhile.
            with suppress(OSError):
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _make() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(str(folder)) <= MAX_FOLDER_LENGTH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHORT_TEMP))
