"""KV cache events under TensorRT-LLM's names, and the log that keeps them until the caller reads them."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sluice.executor.report_log import ReportLog
from sluice.executor.waiting import Timeout
from sluice.v1 import admin_pb2 as pb

CAPACITY = 1 << 14
"""Unread events above which no more are received; they stay in the engines' buffers."""
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
        return {"event_id": self.event_id, "data": _data_as_dict(self.data)} | origin


class KVCacheEventLog(ReportLog):
    """Keeps the events of all engines until they are read, and skips events that it has received before."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        super().__init__()
        self._capacity = capacity
        self._events: deque[KVCacheEvent] = deque()
        self._next: dict[str, tuple[int, int]] = {}
        """(epoch, number of the next event) by engine."""

    @property
    def full(self) -> bool:
        return len(self._events) >= self._capacity

    def put(self, response: pb.StreamCacheEventsResponse) -> None:
        engine, epoch = response.engine_id, response.engine_epoch
        with self._lock:
            known_epoch, next_id = self._next.get(engine, (epoch, 0))
            next_id = next_id if known_epoch == epoch else 0
            for event in response.events:
                # Another router starts again at the engine's oldest events.
                if event.event_id >= next_id:
                    dropped = event.event_id - next_id
                    self._events.append(KVCacheEvent(event.event_id, _read(event), engine, epoch, dropped))
                    next_id = event.event_id + 1
            self._next[engine] = epoch, next_id
            self._condition.notify_all()

    def take(self, timeout: Timeout) -> list[KVCacheEvent]:
        """Wait for events and return all of them; empty at the timeout.

        Raises the SluiceError that ended the feed, or RuntimeError after `close`, once all events have been returned.
        """
        with self._lock:
            self._wait(lambda: bool(self._events), timeout)
            events = list(self._events)
            self._events.clear()
            return events


def _read(event: pb.CacheEvent) -> KVCacheEventData:
    kind = event.WhichOneof("data")
    return KVCacheUnknownData() if kind is None else _READERS[kind](getattr(event, kind))


def _read_created(created: pb.CacheCreated) -> KVCacheCreatedData:
    return KVCacheCreatedData((created.device_blocks, created.host_blocks))


def _read_stored(stored: pb.CacheStored) -> KVCacheStoredData:
    tokens = tuple(map(UniqueToken, stored.token_ids))
    adapter = stored.adapter_version or None
    block = KVCacheStoredBlockData(stored.block_hash, tokens, adapter, _level(stored.tier), stored.priority)
    return KVCacheStoredData(stored.parent_hash if stored.HasField("parent_hash") else None, (block,))


def _read_removed(removed: pb.CacheRemoved) -> KVCacheRemovedData:
    return KVCacheRemovedData(tuple(removed.block_hashes))


def _read_updated(updated: pb.CacheUpdated) -> KVCacheUpdatedData:
    level = _diff(_level(updated.old_tier), _level(updated.new_tier))
    return KVCacheUpdatedData(updated.block_hash, level, _diff(updated.old_priority, updated.new_priority))


_READERS: dict[str, Callable[[Any], KVCacheEventData]] = {
    "created": _read_created,
    "stored": _read_stored,
    "removed": _read_removed,
    "updated": _read_updated,
}


def _level(tier: int) -> int:
    return LEVELS.get(tier, UNKNOWN_LEVEL)


def _diff(old: int, new: int) -> KVCacheEventDiff | None:
    return None if old == new else KVCacheEventDiff(old, new)


def _data_as_dict(data: KVCacheEventData) -> dict[str, Any]:
    match data:
        case KVCacheCreatedData():
            return {"type": "created", "num_blocks_per_cache_level": list(data.num_blocks_per_cache_level)}
        case KVCacheStoredData():
            blocks = [_block_as_dict(block) for block in data.blocks]
            return {"type": "stored", "parent_hash": data.parent_hash, "blocks": blocks}
        case KVCacheRemovedData():
            return {"type": "removed", "block_hashes": list(data.block_hashes)}
        case KVCacheUpdatedData():
            level, priority = _diff_as_dict(data.cache_level), _diff_as_dict(data.priority)
            return {"type": "updated", "block_hash": data.block_hash, "cache_level": level, "priority": priority}
        case KVCacheUnknownData():
            return {"type": "unknown"}


def _block_as_dict(block: KVCacheStoredBlockData) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": block.block_hash,
        "tokens": [{"type": "unique_token"} | token._asdict() for token in block.tokens],
        "lora_id": block.lora_id,
        "cache_level": block.cache_level,
        "priority": block.priority,
    }


def _diff_as_dict(diff: KVCacheEventDiff | None) -> dict[str, Any] | None:
    return None if diff is None else {"type": "event_diff"} | asdict(diff)
