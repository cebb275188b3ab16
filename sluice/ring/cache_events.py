"""KV cache events on the ring: every change of an engine's prefix cache, for users.

Blocks are named by `sluice.ring.hashing.short_hash`. Events are pulled: nothing is sent that nobody asked for.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.ring.message import Count, Message, Name, Number, Retention, TokenId, Total

MAX_EVENTS = 4096
"""In one answer."""
MAX_ITEMS = 1 << 16
"""Tokens and hashes in one answer, if it has more than one event: some 300 KB."""
MAX_REMOVED = 1024
"""Blocks in one event."""

BlockHash = Number


class Tier(IntEnum):
    """Where a block is. Numbers as TensorRT-LLM's cache levels."""

    DEVICE = 0
    HOST = 1


class Created(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first event of an engine."""

    blocks: Annotated[list[Count], Meta(min_length=2, max_length=2)]
    """By tier."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A block became findable, on the device."""

    block: BlockHash
    parent: BlockHash | None
    """The block before it; None: it is the first of its prompt."""
    tokens: Annotated[Sequence[TokenId], Meta(max_length=MAX_ITEMS)]
    priority: Retention
    adapter: Name = ""
    """Version of the adapter; empty: none."""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks left all tiers."""

    blocks: Annotated[list[BlockHash], Meta(max_length=MAX_REMOVED)]


class Updated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A block moved to another tier, or got another priority, or both. What did not change is the same twice."""

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
    """engine → router on the side lane: the oldest events that a reader has not got. Those that the buffer does not
    hold any more are missing between `start` and `first`."""

    engine: Name
    engine_epoch: Number
    reader: Number
    start: Total
    """As in `ReadCacheEvents`."""
    first: Total
    """Number of the first event here, or of the next one if there are none. Numbers begin with 0."""
    events: Annotated[list[CacheEvent], Meta(max_length=MAX_EVENTS)]


def size_of(event: CacheEvent) -> int:
    """Tokens or hashes in it, and one."""
    if isinstance(event, Stored):
        return 1 + len(event.tokens)
    return 1 + len(event.blocks) if isinstance(event, Removed) else 1
