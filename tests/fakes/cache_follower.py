"""A reader of an engine's KV cache events, which derives the cache's contents from the events alone."""

from typing import NamedTuple

from engine_worker.kvcache.events import EventLog
from engine_worker.kvcache.tiers import Tiers
from sluice.wire.cache_events import CacheEvent, Created, Removed, Stored, Tier, Updated
from sluice.wire.hashing import short_hash


class Block(NamedTuple):
    tokens: tuple[int, ...]
    tier: Tier
    priority: int


class CacheFollower:
    """Fails if an event contradicts the events before it."""

    def __init__(self) -> None:
        self.next = 0
        """Number of the next event to read."""
        self.dropped = 0
        """Events that were no longer in the log when it was read."""
        self.blocks: dict[int, Block] = {}
        self.parents: dict[int, int | None] = {}
        """Parent of each block that was ever stored."""
        self.adapters: dict[int, str] = {}
        """Adapter of each block that was ever stored."""

    def read(self, log: EventLog) -> None:
        while (page := log.since(self.next)).events:
            self.dropped += page.first - self.next
            for event in page.events:
                self.apply(event)
            self.next = page.first + len(page.events)

    def apply(self, event: CacheEvent) -> None:
        match event:
            case Created():
                assert not self.blocks
            case Stored():
                assert event.block not in self.blocks
                self.blocks[event.block] = Block(tuple(event.tokens), Tier.DEVICE, event.priority)
                self.parents[event.block] = event.parent
                self.adapters[event.block] = event.adapter
            case Removed():
                for block in event.blocks:
                    del self.blocks[block]
            case Updated():
                assert (event.old_tier, event.old_priority) != (event.tier, event.priority)
                tokens, *state = self.blocks[event.block]
                assert state == [event.old_tier, event.old_priority]
                self.blocks[event.block] = Block(tokens, event.tier, event.priority)


def contents(tiers: Tiers) -> dict[int, Block]:
    """The cache's actual contents, by short hash, in the form of `CacheFollower.blocks`."""
    blocks = {}
    # What is in both is on the device.
    for tier, pool in ((Tier.HOST, tiers.host), (Tier.DEVICE, tiers.device)):
        for block, content in pool.contents():
            retention = pool.retention(block)
            blocks[short_hash(content.hash)] = Block(content.tokens, tier, retention[0].priority)
    return blocks
