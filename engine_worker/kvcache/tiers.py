"""The device pool and the host pool, and the moves of blocks between them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain

from engine_worker.kvcache.events import EventLog
from engine_worker.kvcache.eviction import DEFAULT
from engine_worker.kvcache.journal import Journal
from engine_worker.kvcache.pool import BlockPool, CacheCorruptError, Priorities, Stored
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Content, Move, MoveKind
from sluice.wire.cache_events import Tier


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
        """`event_buffer`: number of events to keep for clients; 0: events are not recorded. `file`: in which the blocks
        of one of the pools are. Raises OSError if the content that it has does not fit in memory."""
        self.events = EventLog(event_buffer, num_blocks, num_host_blocks) if event_buffer else None
        note = None if self.events is None else self._prioritized
        on_host = file is not None and file.layout.on_host
        self.device = BlockPool(num_blocks, clock, note and partial(note, Tier.DEVICE), None if on_host else file)
        self.host = BlockPool(num_host_blocks, clock, note and partial(note, Tier.HOST), file if on_host else None)
        self.shared = self.host if on_host else self.device
        """The pool that other engines can read, if there is a file."""
        self.file = file
        self.journal = Journal()
        self._moves: list[Move] = []
        self._launched: list[tuple[Move, ...]] = []
        """Moves of the steps that have not ended."""
        self.evictions = 0
        """Device blocks whose content was evicted since the start, offloaded or not."""
        self.offloads = 0
        self.onloads = 0
        self.saves = 0
        """Full blocks copied to the host before they were evicted."""
        self.adopted = 0
        """Blocks that another engine has computed, before this one started with its file."""
        for content in self.shared.adopt():
            self._copied(content)
            self.adopted += 1

    @property
    def kept(self) -> dict[str, int]:
        """What a former engine has left, for the log."""
        return {} if self.file is None else {"kv_adopted_blocks": self.adopted, "kv_damaged_blocks": self.file.damaged}

    @property
    def pending(self) -> list[Move]:
        """The moves of the next step."""
        return self._moves

    @property
    def saving(self) -> bool:
        """Whether moves are pending that should not wait until a sequence can be computed."""
        return False

    def holds(self, content: Content) -> bool:
        return self.device.find(content) is not None or self.host.find(content) is not None

    def allocate(self) -> int:
        """A device block, held once. Content that is evicted for it is offloaded if the host has room."""
        block, evicted = self.device.allocate()
        self.evictions += evicted is not None
        if evicted is not None and not self._offload(block, evicted):
            self._removed(evicted)
        return block

    def onload(self, source: int) -> int:
        """Move the content of a held host block to a device block, which is held once."""
        block = self.allocate()
        stored = self._take(source)
        if stored is None:
            raise CacheCorruptError(f"host block {source} has no content to load")
        self.device.publish(block, *stored)
        self._moved(stored, Tier.DEVICE, stored.priority)
        self._moves.append(Move(MoveKind.ONLOAD, source, block))
        self.onloads += 1
        return block

    def copy(self, source: int, target: int) -> None:
        """Copy the content of a device block to another one."""
        self._moves.append(Move(MoveKind.COPY, source, target))

    def reserve(self, limit: int) -> list[int]:
        """At most `limit` shared blocks, each held once, for content that another thread writes: none that a move of a
        step still reads or writes."""
        moving, blocks, skipped = self._moving(), list[int](), list[int]()
        while len(blocks) < limit and self.shared.available:
            block, evicted = self.shared.allocate()
            if evicted is not None:
                # Not offloaded: the block is written before a step could copy it.
                self.evictions += self.shared is self.device
                self._removed(evicted)
            (skipped if block in moving else blocks).append(block)
        for block in skipped:
            self.shared.release(block)
        return blocks

    def publish_copy(self, block: int, content: Content, total: int) -> None:
        """Like `publish`, for a shared block with content of another engine. `total`: its sum, see `PoolFile.put`."""
        self._publish(block, content, total)

    def publish(self, block: int, content: Content) -> None:
        """Make a held, full and computed device block findable, unless another device block with this content is."""
        self._publish(block, content, None)

    def _publish(self, block: int, content: Content, total: int | None) -> None:
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
        """Remove and return the pending moves, for the next step. If that step fails, `undo` them."""
        moves, self._moves = tuple(self.pending), []
        if moves:
            self._launched.append(moves)
        return moves

    def drop_moves(self) -> tuple[Move, ...]:
        """Remove and return the pending moves, to `undo` them."""
        moves, self._moves = tuple(self.pending), []
        return moves

    def ended(self, moves: tuple[Move, ...]) -> None:
        """The step with these moves has ended, or will not be computed."""
        if moves in self._launched:
            self._launched.remove(moves)

    def complete(self, moves: tuple[Move, ...]) -> None:
        """A step has carried out these moves."""
        if not moves:
            return
        self.ended(moves)
        if self.file is not None:
            self._keep(moves, self.file)

    def undo(self, moves: Iterable[Move], in_flight: Iterable[Move] = ()) -> set[int]:
        """Drop the content that these moves should have copied; returns the device blocks whose content is undefined.
        `in_flight`: further moves, which steps in flight still carry out, in vain."""
        lost: set[int] = set()
        for kind, _, target in (*moves, *in_flight):
            pool = self.host if kind.to_host else self.device
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
            self.events.removed(dict.fromkeys([*self.device.hashes(), *self.host.hashes()]))
        return self.device.flush() + self.host.flush()

    def check(self, held: Mapping[int, int], copying: Iterable[int] = ()) -> None:
        """Raise CacheCorruptError unless both pools are consistent, blocks are held as stated and no others, and no
        content is in both pools. `held`: device blocks, with the number of holders. `copying`: shared blocks, from
        `reserve`."""
        copied = dict.fromkeys(copying, 1)
        self.device.check({**held, **copied} if self.shared is self.device else held)
        self.host.check(copied if self.shared is self.host else {})
        self._check_both()

    def _check_both(self) -> None:
        twice = {content.hash for _, content in self.device.contents()}
        twice &= {content.hash for _, content in self.host.contents()}
        if twice:
            raise CacheCorruptError(f"{len(twice)} blocks are findable on the device and on the host")

    def _take(self, block: int) -> Stored | None:
        """The content of a host block that is loaded. The block becomes unfindable."""
        return self.host.forget(block)

    def _offload(self, block: int, evicted: Stored) -> bool:
        """Move evicted content to a host block; False if none is available, or only by evicting a higher priority."""
        target = self._allocate_host(evicted, evicted.priority)
        if target is None:
            return False
        self._moved(evicted, Tier.HOST, evicted.priority)
        self._moves.append(Move(MoveKind.OFFLOAD, block, target))
        self.offloads += 1
        return True

    def _allocate_host(self, stored: Stored, highest: int) -> int | None:
        """Publish content in a host block; None if none is available, or only by evicting a higher priority than
        `highest`."""
        host = self.host
        if not host.available or (not host.num_free and host.lowest_priority() > highest):
            return None
        target, dropped = host.allocate()
        if dropped is not None:
            self._removed(dropped)
        host.publish(target, *stored)
        # Host blocks are cached, not held, except while they are about to be loaded or receive a copy.
        host.release(target)
        return target

    def _keep(self, moves: tuple[Move, ...], file: PoolFile) -> None:
        """Note in the file which content has arrived."""
        to_come = self._targets()
        for kind, _, target in moves:
            if self.shared is not (self.host if kind.to_host else self.device):
                continue
            total = file.take_sum(target)
            # Otherwise the block has been given to other content meanwhile, which has not arrived.
            if kind is not MoveKind.COPY and target not in to_come:
                self.shared.keep(target, total)

    def _moving(self) -> set[int]:
        """The shared blocks that moves read or write which no step has carried out yet."""
        host = self.shared is self.host
        sources = {source for kind, source, _ in self._unfinished() if kind.from_host == host}
        return sources | self._targets()

    def _targets(self) -> set[int]:
        """The shared blocks that these moves write."""
        host = self.shared is self.host
        return {target for kind, _, target in self._unfinished() if kind.to_host == host}

    def _unfinished(self) -> Iterator[Move]:
        return chain(*self._launched, self.pending)

    def _copied(self, content: Content) -> None:
        """Content of another engine was published in a shared block."""
        self._stored(content)

    def _prioritized(self, tier: Tier, digest: bytes, priorities: Priorities) -> None:
        if self.events is not None:
            self.events.prioritized(tier, digest, priorities)

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
