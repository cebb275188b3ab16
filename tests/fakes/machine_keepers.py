"""Keepers as the state machine of engines sees them: without sockets. The machine decides when they
answer."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from engine_worker.pool_files.peer_file import Found
from engine_worker.pool_files.peer_files import PeerFiles
from engine_worker.pool_files.pool_file import PoolFile
from tests.fakes.engine import EngineBench


class MachineKeepers:
    """Implements `kvcache.keepers.Keepers`. One keeper hands out the blocks of all machines."""

    def __init__(self, machines: Path, file: PoolFile) -> None:
        """`machines`: has a folder for each machine."""
        self.own = str(machines)
        self.failures: Mapping[str, int] = {}
        self.failing = 0
        """Number of the next questions that are not answered, and of the blocks that do not arrive."""
        self._file = file

    def find(self, address: str, digests: list[bytes], end: float) -> int:
        if self._fails():
            return 0
        return next((i for i, digest in enumerate(digests) if self._found(digest) is None), len(digests))

    def read(self, address: str, digests: list[bytes], blocks: list[int], end: float) -> list[int]:
        sums = list[int]()
        for digest, block in zip(digests, blocks, strict=True):
            found = self._found(digest)
            data = None if found is None or self._fails() else found.file.read(found, digest)
            if found is None or data is None or not self._file.write(block, data, found.total):
                break
            sums.append(found.total)
        self._file.erase(blocks[len(sums) :])
        return sums

    def drop(self) -> bool:
        return not self._fails()

    def stop(self) -> None: ...

    def close(self) -> None: ...

    def _found(self, digest: bytes) -> Found | None:
        layout = self._file.layout
        for folder in Path(self.own).glob(f"*/{layout.folder}"):
            files = PeerFiles(folder, layout, self._file.path)
            files.refresh()
            for found in files.find(digest):
                return found
        return None

    def _fails(self) -> bool:
        self.failing = max(0, self.failing - 1)
        return self.failing > 0


class Asking:
    """In place of an engine's thread that asks keepers."""

    def __init__(self, bench: EngineBench) -> None:
        searches = bench.cache.fetches._searches
        # Prompts are short here.
        searches._is_worth = bool
        searches._thread = self
        self.keepers: MachineKeepers = searches._keepers
        self._jobs: list[tuple[Callable[..., Any], tuple[Any, ...], Future]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        self._jobs.append((function, arguments, Future()))
        return self._jobs[-1][-1]

    def ask(self, count: int) -> None:
        """Ask up to `count` questions."""
        for function, arguments, future in self._jobs[:count]:
            future.set_result(function(*arguments))
        del self._jobs[:count]
