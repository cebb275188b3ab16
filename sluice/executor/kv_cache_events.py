"""KV cache events under TensorRT-LLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sluice.v1 import admin_pb2 as pb

LEVELS: Mapping[int, int] = {pb.CACHE_TIER_DEVICE: 0, pb.CACHE_TIER_HOST: 1}
UNKNOWN_LEVEL = -1
"""Cache level of a tier that only newer servers have."""


class UniqueToken(NamedTuple):
    """A token of a cached block."""

    token_id: int
    token_extra_id: int = 0
    """Always 0: block hashes cover extra ids, but events do not carry them."""


@dataclass(frozen=True, slots=True)
class KVCacheCreatedData:
    """The engine has started, with an empty cache."""

    num_blocks_per_cache_level: tuple[int, ...]
    """Capacity in blocks, on the device and in host memory."""


@dataclass(frozen=True, slots=True)
class KVCacheStoredBlockData:
    """A block that entered the cache."""

    block_hash: int
    tokens: tuple[UniqueToken, ...]
    lora_id: str | None
    """Hash of the adapter's weights; None: no adapter."""
    cache_level: int
    """0: on the device; 1: in host memory; -1: a level that only newer servers have."""
    priority: int
    """Retention priority, from 0 (evicted first) to 100 (evicted last)."""


@dataclass(frozen=True, slots=True)
class KVCacheStoredData:
    """A block has entered the cache, where requests can reuse it."""

    parent_hash: int | None
    """Hash of the block before it; None: it is the first block of its prompt."""
    blocks: tuple[KVCacheStoredBlockData, ...]
    """The block."""


@dataclass(frozen=True, slots=True)
class KVCacheRemovedData:
    """Blocks have been evicted from all cache levels."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVCacheEventDiff:
    """A change of a value."""

    old_value: int
    new_value: int


@dataclass(frozen=True, slots=True)
class KVCacheUpdatedData:
    """A block moved to another cache level, or changed its priority. None: unchanged."""

    block_hash: int
    cache_level: KVCacheEventDiff | None
    priority: KVCacheEventDiff | None


@dataclass(frozen=True, slots=True)
class KVCacheUnknownData:
    """An event of a kind that this version of the library does not know: a replay of the events is now incomplete."""


KVCacheEventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData | KVCacheUnknownData


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """A change of one engine's KV cache."""

    event_id: int
    """Number of the event in its engine, counted from 0."""
    data: KVCacheEventData
    engine_id: str
    engine_epoch: int
    """Identifies the lifetime of the engine process; it changes when the engine restarts."""
    dropped: int
    """Number of events just before this one that the engine dropped because they were read too slowly."""

    def as_dict(self) -> dict[str, Any]:
        """The event in the JSON form of TensorRT-LLM's `LLM.get_kv_cache_events`."""
        origin = {"engine_id": self.engine_id, "engine_epoch": self.engine_epoch, "dropped": self.dropped}
        return {"event_id": self.event_id, "data": _as_json(self.data)} | origin


def read_data(event: pb.CacheEvent) -> KVCacheEventData:
    match event.WhichOneof("data"):
        case "created":
            return KVCacheCreatedData((event.created.device_blocks, event.created.host_blocks))
        case "stored":
            return _read_stored(event.stored)
        case "removed":
            return KVCacheRemovedData(tuple(event.removed.block_hashes))
        case "updated":
            updated = event.updated
            level = _diff(_level(updated.old_tier), _level(updated.new_tier))
            return KVCacheUpdatedData(updated.block_hash, level, _diff(updated.old_priority, updated.new_priority))
        case _:
            return KVCacheUnknownData()


def _read_stored(stored: pb.CacheStored) -> KVCacheStoredData:
    tokens = tuple(map(UniqueToken, stored.token_ids))
    adapter = stored.adapter_version or None
    block = KVCacheStoredBlockData(stored.block_hash, tokens, adapter, _level(stored.tier), stored.priority)
    return KVCacheStoredData(stored.parent_hash if stored.HasField("parent_hash") else None, (block,))


def _level(tier: int) -> int:
    return LEVELS.get(tier, UNKNOWN_LEVEL)


def _diff(old: int, new: int) -> KVCacheEventDiff | None:
    return None if old == new else KVCacheEventDiff(old, new)


JSON_TYPES = {
    KVCacheCreatedData: "created",
    KVCacheStoredData: "stored",
    KVCacheStoredBlockData: "stored_block",
    UniqueToken: "unique_token",
    KVCacheRemovedData: "removed",
    KVCacheUpdatedData: "updated",
    KVCacheEventDiff: "event_diff",
    KVCacheUnknownData: "unknown",
}


def _as_json(value: Any) -> Any:
    """The JSON form of a value in an event. Each object has a key "type"."""
    if type(value) is tuple:
        return list(map(_as_json, value))
    kind = JSON_TYPES.get(type(value))
    if kind is None:
        return value
    names = value._fields if isinstance(value, UniqueToken) else value.__slots__
    return {"type": kind} | {name: _as_json(getattr(value, name)) for name in names}
