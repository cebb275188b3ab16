"""KV cache events as messages of the public API."""

from collections.abc import Callable

from sluice.v1 import admin_pb2 as pb
from sluice.wire import cache_events as ring

TIERS = {ring.Tier.DEVICE: pb.CACHE_TIER_DEVICE, ring.Tier.HOST: pb.CACHE_TIER_HOST}


def events_message(answer: ring.CacheEvents) -> pb.StreamCacheEventsResponse:
    events = [_event(number, event) for number, event in enumerate(answer.events, answer.first)]
    # All missing events precede the first one.
    events[0].dropped = max(0, answer.first - answer.start)
    return pb.StreamCacheEventsResponse(engine_id=answer.engine, engine_epoch=answer.engine_epoch, events=events)


def _event(number: int, event: ring.CacheEvent) -> pb.CacheEvent:
    return _MAKERS[type(event)](number, event)


def _created(number: int, event: ring.Created) -> pb.CacheEvent:
    device, host = event.blocks
    return pb.CacheEvent(event_id=number, created=pb.CacheCreated(device_blocks=device, host_blocks=host))


def _stored(number: int, event: ring.Stored) -> pb.CacheEvent:
    stored = pb.CacheStored(
        block_hash=event.block,
        parent_hash=event.parent,
        token_ids=event.tokens,
        tier=pb.CACHE_TIER_DEVICE,
        priority=event.priority,
        adapter_version=event.adapter,
    )
    return pb.CacheEvent(event_id=number, stored=stored)


def _removed(number: int, event: ring.Removed) -> pb.CacheEvent:
    return pb.CacheEvent(event_id=number, removed=pb.CacheRemoved(block_hashes=event.blocks))


def _updated(number: int, event: ring.Updated) -> pb.CacheEvent:
    updated = pb.CacheUpdated(
        block_hash=event.block,
        old_tier=TIERS[event.old_tier],
        new_tier=TIERS[event.tier],
        old_priority=event.old_priority,
        new_priority=event.priority,
    )
    return pb.CacheEvent(event_id=number, updated=updated)


_MAKERS: dict[type, Callable[..., pb.CacheEvent]] = {
    ring.Created: _created,
    ring.Stored: _stored,
    ring.Removed: _removed,
    ring.Updated: _updated,
}
