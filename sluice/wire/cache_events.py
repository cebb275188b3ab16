"""KV cache events on the ring: every change of an engine's prefix cache, for users.

Blocks are identified by `sluice.wire.hashing.short_hash`. Routers pull events, so none are sent without a reader.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.wire.message import Count, Message, Name, Number, Retention, TokenId, Total

MAX_EVENTS = 4096
"""Maximum number of events in one answer."""
MAX_ITEMS = 1 << 16
"""Maximum number of tokens and hashes in an answer of more than one event, about 300 KB."""
MAX_REMOVED = 1024
"""Maximum number of blocks in a `Removed` event."""

BlockHash = Number


class Tier(IntEnum):
    """The memory that contains a block. The numbers are those of TensorRT-LLM's cache levels."""

    DEVICE = 0
    HOST = 1


class Created(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first event of an engine."""

    blocks: Annotated[list[Count], Meta(min_length=2, max_length=2)]
    """Number of blocks of each tier."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A block on the device became available for reuse."""

    block: BlockHash
    parent: BlockHash | None
    """The preceding block. None for the first block of a prompt."""
    tokens: Annotated[Sequence[TokenId], Meta(max_length=MAX_ITEMS)]
    priority: Retention
    adapter: Name = ""
    """Version of the LoRA adapter. Empty without one."""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks were removed from all tiers."""

    blocks: Annotated[list[BlockHash], Meta(max_length=MAX_REMOVED)]


class Updated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A block moved to another tier or its priority changed, or both. The old and new values may be equal."""

    block: BlockHash
    old_tier: Tier
    tier: Tier
    old_priority: Retention
    priority: Retention


CacheEvent = Created | Stored | Removed | Updated


class ReadCacheEvents(Message, frozen=True):
    """router → engine: send the events from this number on, with the next heartbeat. Safe to repeat."""

    engine_epoch: Number
    router: Name
    """Address of the inbox for the answer."""
    reader: Number
    """Random; identifies the reader in the answer."""
    start: Total


class CacheEvents(Message, frozen=True):
    """engine → router on the side lane: the oldest events that a reader has not received yet.

    Events from `start` to `first` - 1 are missing because the buffer has dropped them.
    """

    engine: Name
    engine_epoch: Number
    reader: Number
    start: Total
    """See `ReadCacheEvents`."""
    first: Total
    """Number of the first event in `events`, or of the next event if it is empty. Numbers start at 0."""
    events: Annotated[list[CacheEvent], Meta(max_length=MAX_EVENTS)]


def size_of(event: CacheEvent) -> int:
    """The number of tokens or hashes in an event, plus one."""
    if isinstance(event, Stored):
        return 1 + len(event.tokens)
    return 1 + len(event.blocks) if isinstance(event, Removed) else 1
