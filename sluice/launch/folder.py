"""The private folder of a ring: its sockets and status files."""

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
# The path of an ipc socket may have about 107 bytes, on macOS 103.
MAX_FOLDER_LENGTH = 80


class Folder:
    """Only this user may enter it. It is stale once no process holds `lock`, which the children inherit."""

    def __init__(self) -> None:
        self.path = _make()
        # A lock and not a pid file: a pid may have been reused, or belong to another container with the same /tmp.
        new = self.path / f"{LOCK}.new"
        self.lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        os.write(self.lock, b"%d\n" % os.getpid())
        # Renamed after locking, so that the file is never seen unlocked under its name.
        new.rename(self.path / LOCK)
        self._removed = False

    def remove(self) -> None:
        """Idempotent."""
        if not self._removed:
            self._removed = True
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)


def remove_stale() -> None:
    """Remove the folders of this user's launchers that were killed, once their children have exited too."""
    for parent in {Path(tempfile.gettempdir()), Path(SHORT_TEMP)}:
        for path in parent.glob(f"{PREFIX}*"):
            # Another user's, in use, or removed meanwhile.
            with suppress(OSError):
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
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
