"""Files that are reloaded when they change: certificates, tokens."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from structlog.stdlib import BoundLogger

T = TypeVar("T")
Stamp = tuple[int, ...] | None
"""Identifies a version of a file; None if the file is missing."""


class ReloadingFile(Generic[T]):
    """A value that `read` builds from one or more files. Raises what `read` raises: OSError, ValueError."""

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        self.paths = tuple(paths)
        self._read = read
        self._used = self._seen = self._stamps()
        self.value = read()

    def reload(self) -> bool:
        """Read the files if they have changed. Returns whether there is a new value.

        If `read` raises, the old value is kept until the files change again.
        """
        stamps = self._stamps()
        # Wait until the files are unchanged between two successive calls: before that they may be half written.
        settled, self._seen = stamps == self._seen, stamps
        if stamps == self._used or not settled:
            return False
        self._used = stamps
        self.value = self._read()
        return True

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(map(_stamp, self.paths))


@dataclass(frozen=True)
class Reloader:
    _files: Sequence[ReloadingFile[Any]]
    _log: BoundLogger
    counts: Counter[str] = field(default_factory=lambda: Counter(loaded=0, failed=0))

    async def run(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            for files in self._files:
                # In a thread, because a network file system may block.
                await asyncio.to_thread(self._reload, files)

    def _reload(self, files: ReloadingFile[Any]) -> None:
        try:
            if files.reload():
                self._log.info("files_reloaded", files=files.paths)
                self.counts["loaded"] += 1
        except (OSError, ValueError) as error:
            self._log.warning("file_reload_failed", files=files.paths, error=str(error))
            self.counts["failed"] += 1


def _stamp(path: str) -> Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
