"""Files that are read again when they change: certificates, tokens."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from structlog.stdlib import BoundLogger

T = TypeVar("T")
Stamp = tuple[int, ...] | None
"""What changes when a file does; None: it is not there."""


class ReloadingFile(Generic[T]):
    """What `read` makes of some files. Raises what `read` raises: OSError, ValueError."""

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        self.paths = tuple(paths)
        self._read = read
        self._used = self._seen = self._stamps()
        self.value = read()

    def reload(self) -> bool:
        """Whether there is a new value. Raises as above; the old value stays then, until the files change again.

        Files count as changed once they were the same at two looks: before, somebody may still be writing.
        """
        stamps = self._stamps()
        settled, self._seen = stamps == self._seen, stamps
        if stamps == self._used or not settled:
            return False
        self._used = stamps
        self.value = self._read()
        return True

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(map(_stamp, self.paths))


class Reloads:
    """Looks at files again and again, and counts by outcome what came of their changes."""

    def __init__(self, files: Sequence[ReloadingFile[Any]], logger: BoundLogger) -> None:
        self.counts: Counter[str] = Counter(loaded=0, failed=0)
        self._files = files
        self._logger = logger

    async def run(self, interval: float) -> None:
        """For ever, every `interval` seconds."""
        while True:
            await asyncio.sleep(interval)
            for files in self._files:
                # In a thread: a folder on a network may be slow.
                await asyncio.to_thread(self._look, files)

    def _look(self, files: ReloadingFile[Any]) -> None:
        try:
            if files.reload():
                self.counts["loaded"] += 1
                self._logger.info("files loaded", files=files.paths)
        except (OSError, ValueError) as error:
            self.counts["failed"] += 1
            self._logger.warning("changed files cannot be used, the old ones stay", files=files.paths, error=str(error))


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
