"""The file of an ipc socket. At most one process listens at a path, and no process removes another's file.

ZeroMQ alone would replace any file at the path, and would remove any file there when it closes the socket.
"""

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

IN_USE = "another process listens there"
BACKLOG = 100
"""Maximum number of connections that wait to be accepted, as in ZeroMQ."""

FileId = tuple[int, int]
"""Device and inode."""


class ListenError(OSError):
    """An address cannot be listened on. The message contains the reason."""

    def __init__(self, address: str, reason: str, in_use: bool = False) -> None:
        super().__init__(f"cannot listen on {address}: {reason}")
        self.in_use = in_use
        """Whether another process listens at the address."""
        self._arguments = (address, reason, in_use)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


class SocketFile:
    """The exclusive right to listen at `path`, until `close` or the end of the process. Raises ListenError.

    The right is a lock (flock) on the file PATH.lock. The kernel releases it when the process exits for any reason, so
    a remaining lock file is harmless.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._address = f"ipc://{path}"
        self._lock_path = path.with_name(path.name + ".lock")
        self._socket: FileId | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._acquire()
        except OSError as error:
            raise self._refusal(error) from error

    def listen(self) -> int:
        """A new descriptor that listens at the path, accessible to processes of the same user. The caller owns it."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            self._clear()
            listener.bind(str(self._path))
            self._socket = _id(self._path)
            self._path.chmod(0o600)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise self._refusal(error) from error
        return listener.detach()

    def close(self) -> None:
        """Remove the files that still belong to this process, and release the path."""
        with suppress(FileNotFoundError):
            if self._owned():
                self._path.unlink()
        with suppress(FileNotFoundError):
            # Safe under the lock: a process that has opened the file checks the inode again once it has the lock.
            if _id(self._lock_path) == _id(self._lock):
                self._lock_path.unlink()
        os.close(self._lock)

    def _acquire(self) -> int:
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file may have been removed and created again between open and flock.
                if _id(self._lock_path) == _id(lock):
                    os.truncate(lock, 0)
                    os.write(lock, b"%d\n" % os.getpid())
                    return lock
            except BlockingIOError:
                holder = os.read(lock, 20).decode(errors="replace").strip()
                os.close(lock)
                reason = f"process {holder} listens there" if holder else IN_USE
                raise ListenError(self._address, reason, in_use=True) from None
            except FileNotFoundError:
                pass  # The former owner has just removed the file.
            except OSError:
                os.close(lock)
                raise
            os.close(lock)

    def _clear(self) -> None:
        """Remove the socket file of a dead process, or the former one of this process."""
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise ListenError(self._address, "the file there is not a socket")
            if not self._owned() and _is_served(self._path):
                raise ListenError(self._address, IN_USE, in_use=True)
            self._path.unlink()

    def _owned(self) -> bool:
        return self._socket is not None and _id(self._path) == self._socket

    def _refusal(self, error: OSError) -> ListenError:
        return error if isinstance(error, ListenError) else ListenError(self._address, error.strerror or str(error))


def _is_served(path: Path) -> bool:
    """Whether a process listens there that does not use the lock and so is not one of Sluice's."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _id(file: Path | int) -> FileId:
    status = os.stat(file)
    return status.st_dev, status.st_ino
