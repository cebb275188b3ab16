"""Files of uploaded adapters, kept to be sent to engines."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.errors import RequestError
from sluice.wire.adapters import AdapterFiles
from sluice.wire.errors import ErrorCode


class AdapterFileStore:
    """Holds at most `limit` bytes. Files that are no longer needed are evicted to make room for new ones."""

    def __init__(self, limit: int, is_registered: Callable[[str], bool]) -> None:
        """`is_registered`: whether an adapter id currently refers to this version."""
        self._limit = limit
        self._is_registered = is_registered
        self._files: OrderedDict[str, AdapterFiles] = OrderedDict()
        """By version, least recently added first."""
        self._users: Counter[str] = Counter()
        """By version: number of calls that currently need the files."""

    @property
    def nbytes(self) -> int:
        return sum(files.nbytes for files in self._files.values())

    def get(self, version: str) -> AdapterFiles | None:
        return self._files.get(version)

    def add(self, files: AdapterFiles) -> str:
        """Store the files and return their version. Raises RequestError OVERLOADED if there is no room."""
        version = files.version
        if version in self._files:
            self._files.move_to_end(version)
            return version
        evictable = [stored for stored in self._files if not self._users[stored] and not self._is_registered(stored)]
        while evictable and self.nbytes + files.nbytes > self._limit:
            del self._files[evictable.pop(0)]
        if self.nbytes + files.nbytes > self._limit:
            message = (
                f"the adapter's files have {files.nbytes} bytes; the adapters in use take {self.nbytes} of the "
                f"{self._limit} bytes of lora_upload_memory"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        self._files[version] = files
        return version

    @contextmanager
    def using(self, files: AdapterFiles) -> Iterator[None]:
        """Keep a call's uploaded files until the end of the `with` block. If the block succeeds, they stay until their
        room is needed.

        Raises RequestError OVERLOADED if there is no room.
        """
        version, succeeded = self.add(files), False
        self._users[version] += 1
        try:
            yield
            succeeded = True
        finally:
            self._users[version] -= 1
            if not self._users[version]:
                del self._users[version]
                if not (succeeded or self._is_registered(version)):
                    del self._files[version]
