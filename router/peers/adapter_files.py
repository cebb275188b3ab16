"""The files of uploaded adapters, from which engines get them."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.errors import RequestError
from sluice.ring.adapters import AdapterFiles
from sluice.ring.errors import ErrorCode


class AdapterFileStore:
    """Of at most `limit` bytes: those that nothing needs any more make room for new ones."""

    def __init__(self, limit: int, named: Callable[[str], bool]) -> None:
        """`named`: whether an id stands for this version."""
        self._limit = limit
        self._named = named
        self._files: OrderedDict[str, AdapterFiles] = OrderedDict()
        self._users: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        return sum(files.nbytes for files in self._files.values())

    def get(self, version: str) -> AdapterFiles | None:
        return self._files.get(version)

    def add(self, files: AdapterFiles) -> str:
        """Returns the version. Raises RequestError OVERLOADED if there is no room."""
        version = files.version
        if version in self._files:
            self._files.move_to_end(version)
            return version
        needless = [each for each in self._files if not self._users[each] and not self._named(each)]
        while needless and self.nbytes + files.nbytes > self._limit:
            del self._files[needless.pop(0)]
        if self.nbytes + files.nbytes > self._limit:
            message = (
                f"the adapter's files have {files.nbytes} bytes; the adapters in use take {self.nbytes} of the "
                f"{self._limit} bytes of lora_upload_memory"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        self._files[version] = files
        return version

    @contextmanager
    def using(self, files: AdapterFiles | None) -> Iterator[None]:
        """Keep them, of a call that brought them, until the end of the body; if it succeeds, longer if there is room.

        Raises as `add`.
        """
        if files is None:
            yield
            return
        version, succeeded = self.add(files), False
        self._users[version] += 1
        try:
            yield
            succeeded = True
        finally:
            self._users[version] -= 1
            if not self._users[version]:
                del self._users[version]
                if not (succeeded or self._named(version)):
                    del self._files[version]
