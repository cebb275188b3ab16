"""The device pool and the host pool, the moves of blocks between them, and the journal of findable blocks."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from threading import Lock

from engine_worker.kvcache.events import EventLog
from engine_worker.kvcache.eviction import DEFAULT
from engine_worker.kvcache.pool import BlockPool, CacheCorruptError, Stored
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Content, Move, MoveKind
from sluice.wire.cache_events import Tier
from sluice.wire.hashing import short_hash
from sluice.wire.heartbeats import CacheChanges


class Tiers:
    """Two pools and the pending moves. The same content is findable in at most one of the pools.

    The next step carries out the moves, in order, before it computes. So a block counts as moved as soon as its move is
    pending.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        clock: Callable[[], float],
        event_buffer: int = 0,
        file: PoolFile | None = None,
    ) -> None:
        """`event_buffer`: number of events to keep for clients; 0: events are not recorded. `file`: in which the device
        blocks are. Raises OSError if the content that it has does not fit in memory."""
        self.events = EventLog(event_buffer, num_blocks, num_host_blocks) if event_buffer else None
        note = None if self.events is None else self.events.prioritized
        self.device = BlockPool(num_blocks, clock, note and partial(note, Tier.DEVICE), file)
        self.host = BlockPool(num_host_blocks, clock, note and partial(note, Tier.HOST))
        self.file = file
        self.journal = Journal()
        self.moves: list[Move] = []
        self.evictions = 0
        """Device blocks whose content was evicted since the start, offloaded or not."""
        self.offloads = 0
        self.onloads = 0
        self._moving = Counter[int]()
        """Device blocks by the number of moves from and to them that a step may still carry out."""
        self.adopted = 0
        """Blocks that another engine has computed, before this one started with its file."""
        for content in self.device.adopt():
            self._stored(content)
            self.adopted += 1

    @property
    def kept(self) -> dict[str, int]:
        """What a former engine has left, for the log."""
        return {} if self.file is None else {"kv_adopted_blocks": self.adopted, "kv_damaged_blocks": self.file.damaged}

    def holds(self, content: Content) -> bool:
        return self.device.find(content) is not None or self.host.find(content) is not None

    def allocate(self) -> int:
        """A device block, held once. Content that is evicted for it is offloaded if the host has room."""
        block, evicted = self.device.allocate()
        self.evictions += evicted is not None
        if evicted is not None and not self._offload(block, evicted):
            self._removed(evicted)
        return block

    def reserve(self, count: int) -> list[int]:
        """Up to `count` device blocks, each held once, that may be written at once: no step uses them any more. Content
        that is evicted for them is dropped, because an offload would read it only with the next step."""
        usable, moving = list[int](), list[int]()
        while len(usable) < count and self.device.available:
            block, evicted = self.device.allocate()
            if evicted is not None:
                self.evictions += 1
                self._removed(evicted)
            (moving if block in self._moving else usable).append(block)
        for block in reversed(moving):
            self.device.release(block)
        return usable

    def onload(self, source: int) -> int:
        """Move the content of a held host block to a device block, which is held once. The host block becomes
        unfindable."""
        block = self.allocate()
        stored = self.host.forget(source)
        if stored is None:
            raise CacheCorruptError(f"host block {source} has no content to load")
        self.device.publish(block, *stored)
        self._moved(stored, Tier.DEVICE, stored.priority)
        self._move(MoveKind.ONLOAD, source, block)
        self.onloads += 1
        return block

    def copy(self, source: int, target: int) -> None:
        """Copy the content of a device block to another one."""
        self._move(MoveKind.COPY, source, target)

    def publish(self, block: int, content: Content, total: int | None = None) -> None:
        """Make a held, full and computed device block findable, unless another device block with this content is.

        `total`: see `PoolFile.put`.
        """
        if not self.device.publish(block, content):
            return
        self.device.keep(block, total)
        copy = self.host.drop(content.hash)
        if copy is not None:
            # The recomputed content replaces the copy on the host. It was findable before, so the journal, which does
            # not distinguish the tiers, does not change.
            self._moved(copy, Tier.DEVICE, DEFAULT[0].priority)
            return
        self._stored(content)

    def take_moves(self) -> tuple[Move, ...]:
        """Remove and return the pending moves, for the next step. `complete` them, or if that step fails, `undo`
        them."""
        moves, self.moves = tuple(self.moves), []
        return moves

    def complete(self, moves: Iterable[Move]) -> None:
        """A step has carried out these moves."""
        for move in moves:
            self._ended(move)
            # Otherwise the block may have been given to other content meanwhile, which has not arrived.
            if move.kind is MoveKind.ONLOAD and move.target not in self._moving:
                self.device.keep(move.target)

    def undo(self, moves: Iterable[Move], in_flight: Iterable[Move] = ()) -> set[int]:
        """Drop the content that these moves should have copied; returns the device blocks whose content is undefined.
        `in_flight`: further moves, which steps in flight still carry out, in vain. They end with these steps."""
        lost: set[int] = set()
        moves, in_flight = list(moves), list(in_flight)
        for move in moves:
            self._ended(move)
        for kind, _, target in (*moves, *in_flight):
            pool = self.host if kind is MoveKind.OFFLOAD else self.device
            stored = pool.forget(target)
            if stored is not None:
                self._removed(stored)
            if pool is self.device:
                lost.add(target)
        return lost

    def flush(self) -> int:
        """Make all blocks unfindable; returns the number of blocks freed in both pools. Holders keep their blocks."""
        self.journal.clear()
        if self.events is not None:
            self.events.removed([*self.device.hashes(), *self.host.hashes()])
        return self.device.flush() + self.host.flush()

    def check(self, held: Mapping[int, int]) -> None:
        """Raise CacheCorruptError unless both pools are consistent, no host block is held and no content is in both."""
        self.device.check(held)
        self.host.check({})
        twice = {content.hash for _, content in self.device.contents()}
        twice &= {content.hash for _, content in self.host.contents()}
        if twice:
            raise CacheCorruptError(f"{len(twice)} blocks are findable on the device and on the host")

    def _offload(self, block: int, evicted: Stored) -> bool:
        """Move evicted content to a host block; False if none is available, or only by evicting a higher priority."""
        host = self.host
        if not host.available or (not host.num_free and host.lowest_priority() > evicted.priority):
            return False
        target, dropped = host.allocate()
        if dropped is not None:
            self._removed(dropped)
        host.publish(target, *evicted)
        self._moved(evicted, Tier.HOST, evicted.priority)
        # Host blocks are cached, not held, except while they are about to be loaded.
        host.release(target)
        self._move(MoveKind.OFFLOAD, block, target)
        self.offloads += 1
        return True

    def _move(self, kind: MoveKind, source: int, target: int) -> None:
        move = Move(kind, source, target)
        self.moves.append(move)
        self._moving.update(move.device_blocks)

    def _ended(self, move: Move) -> None:
        for block in move.device_blocks:
            self._moving[block] -= 1
            if not self._moving[block]:
                del self._moving[block]

    def _stored(self, content: Content) -> None:
        self.journal.store(content.hash)
        if self.events is not None:
            self.events.stored(content, DEFAULT[0].priority)

    def _removed(self, stored: Stored) -> None:
        self.journal.remove(stored.content.hash)
        if self.events is not None:
            self.events.removed([stored.content.hash])

    def _moved(self, stored: Stored, target: Tier, priority: int) -> None:
        if self.events is not None:
            self.events.moved(stored, target, priority)


JOURNAL_CAPACITY = 1 << 16
"""Changes kept; a router that is further behind receives the full state."""


class Journal:
    """Numbered changes of the set of findable blocks, by which routers place requests. Thread-safe."""

    def __init__(self, capacity: int = JOURNAL_CAPACITY) -> None:
        self._lock = Lock()
        self._last = 0
        self._changes: deque[tuple[int, bool]] = deque(maxlen=capacity)
        """(short hash of a block, whether it became findable), the latest last."""
        self._findable: set[int] = set()

    def store(self, digest: bytes) -> None:
        self._record(short_hash(digest), findable=True)

    def remove(self, digest: bytes) -> None:
        self._record(short_hash(digest), findable=False)

    def clear(self) -> None:
        with self._lock:
            self._findable.clear()
            # Without changes every router that is behind receives the full state.
            self._changes.clear()
            self._last += 1

    def since(self, known: int) -> CacheChanges | None:
        """The changes after number `known`; the full state if they are no longer kept; None if nothing changed."""
        with self._lock:
            last, behind = self._last, self._last - known
            if not behind:
                return None
            if not 0 < behind <= len(self._changes):
                return CacheChanges(0, last, list(self._findable), whole=True)
            # Only the last change of each block counts.
            changed = dict(islice(self._changes, len(self._changes) - behind, None))
        stored = [block for block, findable in changed.items() if findable]
        removed = [block for block, findable in changed.items() if not findable]
        return CacheChanges(known, last, stored, removed)

    def _record(self, block: int, findable: bool) -> None:
        with self._lock:
            if findable:
                self._findable.add(block)
            else:
                self._findable.discard(block)
            self._changes.append((block, findable))
            self._last += 1
