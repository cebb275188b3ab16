"""The pools of an engine whose host pool is a file: a block is copied to the host as soon as it is full.

So the host pool holds what the device pool holds, as far as it has room, and outlives the engine.
"""

from collections.abc import Callable
from math import inf
from typing import Final

from engine_worker.kvcache.eviction import DEFAULT, HIGHEST_PRIORITY, Phase, Retention
from engine_worker.kvcache.pool import CacheCorruptError, Priorities, Stored
from engine_worker.kvcache.tiers import Tiers
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Content, Move, MoveKind
from sluice.wire.cache_events import Tier


def make_tiers(
    num_blocks: int, num_host_blocks: int, clock: Callable[[], float], event_buffer: int, file: PoolFile | None
) -> Tiers:
    """See `Tiers`."""
    kind = Tiers if file is None or not file.layout.on_host else SavingTiers
    return kind(num_blocks, num_host_blocks, clock, event_buffer, file)


IN_USE: Final[Retention] = (Phase(inf, HIGHEST_PRIORITY + 1),)
"""Retention of a copy whose block a sequence holds: other copies are evicted first."""


class SavingTiers(Tiers):
    """The same content may be findable in both pools. In events it is then on the device.

    The order in which copies are evicted follows the use of the blocks on the device. A new copy replaces neither
    copies of blocks in use, because the beginning of a long sequence would be evicted for its end, which is useless
    without it, nor what a request wants to be kept.

    A copy is findable as soon as its move is pending, as any moved block, but is in the file only once the step with
    the move was collected. The next step's copies are apart from its other moves, because the device makes them while
    it computes: so a block that the step overwrites must not be among them.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        clock: Callable[[], float],
        event_buffer: int = 0,
        file: PoolFile | None = None,
    ) -> None:
        self._saves: dict[int, int] = {}
        """Device blocks to copy in the next step, by host block."""
        super().__init__(num_blocks, num_host_blocks, clock, event_buffer, file)
        self.device.on_held = self._on_held
        self.device.on_cached = self._on_cached

    @property
    def pending(self) -> list[Move]:
        return [*self._moves, *(Move(MoveKind.SAVE, block, target) for target, block in self._saves.items())]

    @property
    def saving(self) -> bool:
        return bool(self._saves)

    def publish(self, block: int, content: Content) -> None:
        if not self.device.publish(block, content):
            return
        copy = self.host.get(content.hash)
        if copy is not None:
            self._moved(copy, Tier.DEVICE, DEFAULT[0].priority)
            self.host.renew(content.hash, IN_USE)
            return
        self._stored(content)
        target = self._allocate_host(Stored(content, IN_USE), DEFAULT[0].priority)
        if target is not None:
            self._saves[target] = block

    def publish_copy(self, block: int, content: Content, total: int) -> None:
        if self.host.publish(block, content):
            self.host.keep(block, total)
            self._copied(content)

    def take_moves(self) -> tuple[Move, ...]:
        moves = super().take_moves()
        self.saves += len(self._saves)
        self._saves.clear()
        return moves

    def drop_moves(self) -> tuple[Move, ...]:
        moves = super().drop_moves()
        self._saves.clear()
        return moves

    def flush(self) -> int:
        # Their targets are free after this, and may be given to other content.
        self._saves.clear()
        return super().flush()

    def onload(self, source: int) -> int:
        block = super().onload(source)
        if (stored := self.host.stored(source)) is not None:
            self.host.renew(stored.content.hash, IN_USE)
        return block

    def _on_held(self, stored: Stored) -> None:
        self.host.renew(stored.content.hash, IN_USE)

    def _on_cached(self, stored: Stored) -> None:
        self.host.renew(stored.content.hash, stored.retention)

    def _allocate_host(self, stored: Stored, highest: int) -> int | None:
        target = super()._allocate_host(stored, highest)
        if target is not None:
            # What it was to receive was evicted.
            self._saves.pop(target, None)
        return target

    def reserve(self, limit: int) -> list[int]:
        blocks = super().reserve(limit)
        # Blocks to which a copy is pending were skipped, but their content was evicted.
        self._saves = {target: block for target, block in self._saves.items() if self.host.stored(target) is not None}
        return blocks

    def _take(self, block: int) -> Stored | None:
        return self.host.stored(block)

    def _offload(self, block: int, evicted: Stored) -> bool:
        """Nothing is copied if the content is on the host."""
        target = self.host.find(evicted.content)
        if target is None:
            return super()._offload(block, evicted)
        if self._saves.pop(target, None) is not None:
            # The next step overwrites the block: copy it before.
            self._moves.append(Move(MoveKind.OFFLOAD, block, target))
            self.offloads += 1
            if evicted.drafted:
                # Otherwise not: the draft model's part was not computed yet when the copy was made.
                self.host.set_drafted(target)
        self.host.renew(evicted.content.hash, evicted.retention)
        self._moved(evicted, Tier.HOST, evicted.priority)
        return True

    def _copied(self, content: Content) -> None:
        if self.device.get(content.hash) is None:
            self._stored(content)
            self._moved(Stored(content, DEFAULT), Tier.HOST, DEFAULT[0].priority)

    def _removed(self, stored: Stored) -> None:
        """Content was removed from one of the pools."""
        digest = stored.content.hash
        if self.device.get(digest) is not None:
            return
        if self.host.get(digest) is None:
            super()._removed(stored)
        else:
            self.host.renew(digest, stored.retention)
            self._moved(stored, Tier.HOST, stored.priority)

    def _prioritized(self, tier: Tier, digest: bytes, priorities: Priorities) -> None:
        if tier is Tier.DEVICE or self.device.get(digest) is None:
            super()._prioritized(tier, digest, priorities)

    def _check_both(self) -> None:
        for target, block in self._saves.items():
            saved, source = self.host.stored(target), self.device.stored(block)
            if saved is None or source is None or saved.content != source.content:
                raise CacheCorruptError(f"device block {block} is not what host block {target} is to receive")
