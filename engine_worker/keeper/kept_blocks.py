"""Keepers as this engine's cache uses them: blocks that they have become blocks of its pool file."""

from collections.abc import Mapping, Sequence

from engine_worker.keeper.client import KeeperClient
from engine_worker.pool_files.pool_file import PoolFile


class KeptBlocks:
    """Implements `kvcache.keepers.Keepers`."""

    def __init__(self, client: KeeperClient, own: str, file: PoolFile) -> None:
        """`own`: address of the keeper on this machine."""
        self.own = own
        self.failures: Mapping[str, int] = client.failed
        self._client = client
        self._file = file

    def find(self, address: str, digests: Sequence[bytes], end: float) -> int:
        return self._client.find(address, self._file.layout, digests, end)

    def read(self, address: str, digests: Sequence[bytes], blocks: Sequence[int], end: float) -> list[int]:
        sums = list[int]()

        def store(index: int, total: int, data: memoryview) -> bool:
            whole = self._file.write(blocks[index], data, total)
            if whole:
                sums.append(total)
            return whole

        self._client.read(address, self._file.layout, digests, store, end)
        # What was written in part may be damaged.
        self._file.erase(blocks[len(sums) :])
        return sums

    def drop(self) -> bool:
        return self._client.drop(self.own)

    def stop(self) -> None:
        """Called in any thread, before `close`: `find` and `read` return at once."""
        self._client.stop()

    def close(self) -> None:
        self._client.close()
