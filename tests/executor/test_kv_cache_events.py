"""KV cache events under TensorRT-LLM's names."""

import asyncio

import grpc
import pytest

from sluice.client import InvalidRequest
from sluice.executor import (
    GenerationExecutor,
    KVCacheCreatedData,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUnknownData,
    KVCacheUpdatedData,
    UniqueToken,
)
from sluice.executor.report_logs import KVCacheEventLog
from sluice.v1 import admin_pb2 as pb
from tests.fakes.failures import Failure
from tests.fakes.processes import wait_until

DEVICE, HOST = pb.CACHE_TIER_DEVICE, pb.CACHE_TIER_HOST
EVENTS = [
    pb.CacheEvent(event_id=0, created=pb.CacheCreated(device_blocks=8, host_blocks=4)),
    pb.CacheEvent(
        event_id=1,
        stored=pb.CacheStored(block_hash=2**64 - 1, token_ids=[5, 6], tier=DEVICE, priority=35),
    ),
    pb.CacheEvent(
        event_id=2,
        stored=pb.CacheStored(
            block_hash=9, parent_hash=0, token_ids=[7, 8], tier=HOST, priority=80, adapter_version="ab"
        ),
    ),
    pb.CacheEvent(
        event_id=3,
        updated=pb.CacheUpdated(block_hash=9, old_tier=DEVICE, new_tier=HOST, old_priority=80, new_priority=80),
    ),
    pb.CacheEvent(
        event_id=4,
        updated=pb.CacheUpdated(block_hash=9, old_tier=HOST, new_tier=HOST, old_priority=80, new_priority=35),
    ),
    pb.CacheEvent(event_id=5, removed=pb.CacheRemoved(block_hashes=[9, 2**64 - 1])),
]


def response(events=EVENTS, engine: str = "e", epoch: int = 1) -> pb.StreamCacheEventsResponse:
    return pb.StreamCacheEventsResponse(engine_id=engine, engine_epoch=epoch, events=events)


def numbered(*numbers: int) -> list[pb.CacheEvent]:
    return [pb.CacheEvent(event_id=number, removed=pb.CacheRemoved(block_hashes=[number])) for number in numbers]


def test_every_kind_of_event(address, script) -> None:
    script.cache_events = [response()]
    with GenerationExecutor.connect(address) as executor:
        events = executor.get_kv_cache_events(timeout=60)
        assert executor.get_kv_cache_events() == []
    tokens = (UniqueToken(5), UniqueToken(6)), (UniqueToken(7), UniqueToken(8))
    assert [event.data for event in events] == [
        KVCacheCreatedData((8, 4)),
        KVCacheStoredData(None, (KVCacheStoredBlockData(2**64 - 1, tokens[0], None, 0, 35),)),
        KVCacheStoredData(0, (KVCacheStoredBlockData(9, tokens[1], "ab", 1, 80),)),
        KVCacheUpdatedData(9, KVCacheEventDiff(0, 1), None),
        KVCacheUpdatedData(9, None, KVCacheEventDiff(80, 35)),
        KVCacheRemovedData((9, 2**64 - 1)),
    ]
    assert [(event.event_id, event.engine_id, event.engine_epoch, event.dropped) for event in events] == [
        (number, "e", 1, 0) for number in range(6)
    ]
    assert [event.as_dict()["data"] for event in events[2:5]] == [
        {
            "type": "stored",
            "parent_hash": 0,
            "blocks": [
                {
                    "type": "stored_block",
                    "block_hash": 9,
                    "tokens": [
                        {"type": "unique_token", "token_id": token_id, "token_extra_id": 0} for token_id in (7, 8)
                    ],
                    "lora_id": "ab",
                    "cache_level": 1,
                    "priority": 80,
                }
            ],
        },
        {
            "type": "updated",
            "block_hash": 9,
            "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1},
            "priority": None,
        },
        {
            "type": "updated",
            "block_hash": 9,
            "cache_level": None,
            "priority": {"type": "event_diff", "old_value": 80, "new_value": 35},
        },
    ]


async def test_async_reads(address, script) -> None:
    script.cache_events = [response()]
    with GenerationExecutor.connect(address) as executor:
        assert len(await executor.aget_kv_cache_events(60)) == len(EVENTS)
        assert await executor.aget_kv_cache_events(0.01) == []
        waiting = asyncio.create_task(executor.aget_kv_cache_events(None))
        await asyncio.sleep(0.1)
        waiting.cancel()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.get_kv_cache_events()


def num_event_calls(script) -> int:
    """Number of calls that requested events."""
    return sum(isinstance(request, pb.StreamCacheEventsRequest) for request in script.seen)


def test_events_are_received_from_the_first_read_on(address, script) -> None:
    with GenerationExecutor.connect(address) as executor:
        assert num_event_calls(script) == 0
        executor.get_kv_cache_events(0.2)
        assert wait_until(lambda: num_event_calls(script) == 1)
        executor.get_kv_cache_events(0.2)
    assert num_event_calls(script) == 1


def test_a_server_without_events(address, script) -> None:
    with GenerationExecutor.connect(address) as executor:
        script.failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, "engine_id: kv_event_buffer is 0")
        with pytest.raises(InvalidRequest, match="kv_event_buffer"):
            executor.get_kv_cache_events(60)


def test_repeated_events_are_skipped_and_gaps_are_counted() -> None:
    log = KVCacheEventLog()
    for events in (numbered(0, 1, 2), numbered(1, 2, 3), numbered(7, 8)):
        log.put(response(events))
    log.put(response(numbered(0, 1), engine="other"))
    log.put(response(numbered(2), epoch=2))
    summaries = [(event.engine_id, event.event_id, event.dropped) for event in log.take(0)]
    first = [("e", 0, 0), ("e", 1, 0), ("e", 2, 0), ("e", 3, 0), ("e", 7, 3), ("e", 8, 0)]
    assert summaries == [*first, ("other", 0, 0), ("other", 1, 0), ("e", 2, 2)]


def test_a_full_log_stops_receiving(address, script, monkeypatch) -> None:
    monkeypatch.setattr(KVCacheEventLog.__init__, "__defaults__", (2,))
    script.cache_events = [response(numbered(number)) for number in range(50)]
    with GenerationExecutor.connect(address) as executor:
        events = []
        while len(events) < 50:
            received = executor.get_kv_cache_events(60)
            assert 0 < len(received) <= 2
            events += received
    assert [event.event_id for event in events] == list(range(50))


def test_an_event_of_an_unknown_kind(address, script) -> None:
    events = [*numbered(0), pb.CacheEvent(event_id=1), *numbered(2)]
    script.cache_events = [response(events), response(numbered(3))]
    received = []
    with GenerationExecutor.connect(address) as executor:
        while len(received) < 4:
            received += executor.get_kv_cache_events(60)
    assert [(event.event_id, event.dropped) for event in received] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert received[1].data == KVCacheUnknownData()
    assert received[1].as_dict()["data"] == {"type": "unknown"}


def test_an_unknown_tier() -> None:
    log = KVCacheEventLog()
    stored = pb.CacheStored(block_hash=9, token_ids=[5], tier=7, priority=35)
    moved = pb.CacheUpdated(block_hash=9, old_tier=7, new_tier=HOST, old_priority=35, new_priority=35)
    log.put(response([pb.CacheEvent(event_id=0, stored=stored), pb.CacheEvent(event_id=1, updated=moved)]))
    first, second = log.take(0)
    assert first.data.blocks[0].cache_level == -1
    assert second.data == KVCacheUpdatedData(9, KVCacheEventDiff(-1, 1), None)
