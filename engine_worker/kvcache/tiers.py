"""Where content lies: in the device's blocks or, evicted from there, in the host's; and what has to move between."""

from collections.abc import Callable, Iterable, Mapping

from engine_worker.kvcache.journal import Journal
from engine_worker.kvcache.pool import BlockPool, CacheCorruptError, Stored
from engine_worker.request import Content
from engine_worker.step import Move, MoveKind


class Tiers:
    """Two pools and the moves that are decided but not carried out. What is findable is so in one place only.

    The next step carries all of them out, in order, before it computes. So a block counts as moved at once: whoever
    reads or writes it afterwards comes after the move.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, clock: Callable[[], float]) -> None:
        self.device = BlockPool(num_blocks, clock)
        self.host = BlockPool(num_host_blocks, clock)
        self.journal = Journal()
        self.moves: list[Move] = []
        self.evictions = 0
        """Blocks that lost findable content since the start, moved to the host or not."""
        self.offloads = 0
        self.onloads = 0

    def holds(self, content: Content) -> bool:
        """It can be found, here or there."""
        return self.device.find(content) is not None or self.host.find(content) is not None

    def take(self) -> int:
        """A device block for new content, held once. What it held goes to the host if that has a place for it."""
        block, evicted = self.device.take()
        self.evictions += evicted is not None
        if evicted is not None and not self._offload(block, evicted):
            self.journal.remove(evicted.content.hash)
        return block

    def onload(self, source: int) -> int:
        """A device block, held once, with the content of a held host block, which is findable there no more."""
        block = self.take()
        stored = self.host.forget(source)
        if stored is None:
            raise CacheCorruptError(f"host block {source} holds nothing to be loaded")
        self.device.publish(block, *stored)
        self.moves.append(Move(MoveKind.ONLOAD, source, block))
        self.onloads += 1
        return block

    def copy(self, source: int, target: int) -> None:
        """What is in one device block now is to be in another, too."""
        self.moves.append(Move(MoveKind.COPY, source, target))

    def publish(self, block: int, content: Content) -> None:
        """A held device block is full and computed: it can be found, unless another one with this content can."""
        if self.device.publish(block, content) and not self.host.drop(content.hash):
            self.journal.store(content.hash)

    def take_moves(self) -> tuple[Move, ...]:
        """The moves that the next step has to carry out."""
        moves, self.moves = tuple(self.moves), []
        return moves

    def undo(self, moves: Iterable[Move]) -> set[int]:
        """Forget what these moves were to bring; returns the device blocks that may now hold anything."""
        lost: set[int] = set()
        for kind, _, target in moves:
            pool = self.host if kind is MoveKind.OFFLOAD else self.device
            stored = pool.forget(target)
            if stored is not None:
                self.journal.remove(stored.content.hash)
            if pool is self.device:
                lost.add(target)
        return lost

    def flush(self) -> int:
        """Make nothing findable any more; returns how many blocks that made free, here and there."""
        self.journal.clear()
        return self.device.flush() + self.host.flush()

    def check(self, held: Mapping[int, int]) -> None:
        """Raise CacheCorruptError unless both pools are sound, nobody holds a host block and nothing is there twice."""
        self.device.check(held)
        self.host.check({})
        twice = {content.hash for _, content in self.device.contents()}
        twice &= {content.hash for _, content in self.host.contents()}
        if twice:
            raise CacheCorruptError(f"{len(twice)} blocks can be found on the device and on the host")

    def _offload(self, block: int, evicted: Stored) -> bool:
        """Into a host block, but not in the place of something that is to be kept more eagerly."""
        host = self.host
        if not host.available or (not host.num_free and host.lowest_priority() > evicted.retention[0].priority):
            return False
        target, dropped = host.take()
        if dropped is not None:
            self.journal.remove(dropped.content.hash)
        host.publish(target, *evicted)
        host.release(target)
        self.moves.append(Move(MoveKind.OFFLOAD, block, target))
        self.offloads += 1
        return True
