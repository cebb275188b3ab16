"""StreamCacheEvents: events buffered by fake engines reach every reader in order; dropped events show as a gap."""

import asyncio

import pytest

from engine_worker.kvcache.events import EventLog
from engine_worker.kvcache.pool import Priorities
from engine_worker.step import Content
from router.peers import cache_events
from sluice.v1 import admin_pb2 as pb
from sluice.wire.cache_events import MAX_EVENTS, Tier
from tests.router.conftest import refused


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


def store(log: EventLog, *numbers: int) -> None:
    for number in numbers:
        log.stored(Content(digest(number), (number, 7), digest(number - 1) if number > 1 else None), 35)


@pytest.fixture
async def client(ring, start):
    """Engines "a" and "b" buffer 100 events each, "c" none."""
    for name in ("a", "b", "c"):
        engine = ring.add_engine(name)
        engine.events = None if name == "c" else EventLog(100, 8, 4)
    ring.add_detokenizer()
    return await start()


def engine(ring, name):
    return next(engine for engine in ring.engines.values() if engine.name == name)


def follow(client, engine_id: str = ""):
    return client.admin.StreamCacheEvents(pb.StreamCacheEventsRequest(engine_id=engine_id))


async def read(call, count: int) -> list[tuple[str, int, int]]:
    """(engine, number, dropped) of at least `count` events."""
    events = []
    while len(events) < count:
        response = await call.read()
        events += [(response.engine_id, event.event_id, event.dropped) for event in response.events]
    return events


async def test_every_kind_of_event_keeps_its_fields(client, ring):
    log = engine(ring, "a").events
    store(log, 1, 2)
    log.prioritized(Tier.HOST, digest(2), Priorities(35, 90))
    log.removed([digest(1), digest(2)])
    call = follow(client, "a")
    response = await call.read()
    created, first, second, updated, removed = response.events
    assert (response.engine_id, response.engine_epoch) == ("a", engine(ring, "a").epoch)
    assert created.created == pb.CacheCreated(device_blocks=8, host_blocks=4)
    assert first.stored == pb.CacheStored(block_hash=1, token_ids=[1, 7], tier=pb.CACHE_TIER_DEVICE, priority=35)
    assert not first.stored.HasField("parent_hash")
    assert second.stored.parent_hash == 1
    host = pb.CACHE_TIER_HOST
    assert updated.updated == pb.CacheUpdated(
        block_hash=2, old_tier=host, new_tier=host, old_priority=35, new_priority=90
    )
    assert removed.removed == pb.CacheRemoved(block_hashes=[1, 2])
    assert [event.event_id for event in response.events] == [0, 1, 2, 3, 4]


async def test_readers_get_buffered_events_and_then_new_ones(client, ring):
    for name in ("a", "b"):
        store(engine(ring, name).events, 1)
    calls = [follow(client), follow(client, "b")]
    assert sorted(await read(calls[0], 4)) == [("a", 0, 0), ("a", 1, 0), ("b", 0, 0), ("b", 1, 0)]
    assert await read(calls[1], 2) == [("b", 0, 0), ("b", 1, 0)]
    store(engine(ring, "b").events, 2)
    assert [await read(call, 1) for call in calls] == [[("b", 2, 0)]] * 2
    for call in calls:
        call.cancel()
    await client.until(lambda: not len(client.router.ring.cache_events))
    # After the events that the router has sent so far.
    await client.admin.FlushCache(pb.FlushCacheRequest())
    reads_before = len(engine(ring, "a").reads)
    await asyncio.sleep(0.3)
    await client.admin.FlushCache(pb.FlushCacheRequest())
    assert len(engine(ring, "a").reads) == reads_before
    assert not engine(ring, "c").reads


async def test_dropped_events_are_reported_once(client, ring):
    log = engine(ring, "a").events
    store(log, *range(1, 300))
    call = follow(client, "a")
    events = await read(call, 100)
    assert events == [("a", number, 200 if number == 200 else 0) for number in range(200, 300)]
    store(log, 300)
    assert await read(call, 1) == [("a", 300, 0)]


async def test_a_lost_answer_is_requested_again(client, ring, monkeypatch):
    monkeypatch.setattr(cache_events, "RETRY_SECONDS", 0.1)
    fake_engine = engine(ring, "a")
    fake_engine.answering_reads = False
    call = follow(client, "a")
    await client.until(lambda: len(fake_engine.reads) > 2)
    fake_engine.answering_reads = True
    assert await read(call, 1) == [("a", 0, 0)]
    store(fake_engine.events, 1)
    assert await read(call, 1) == [("a", 1, 0)]


async def test_the_events_of_a_restarted_engine_begin_again(client, ring):
    fake_engine = engine(ring, "a")
    store(fake_engine.events, 1, 2)
    call = follow(client, "a")
    await read(call, 3)
    fake_engine.epoch, fake_engine.events = fake_engine.epoch + 1, EventLog(100, 8, 4)
    response = await call.read()
    assert (response.engine_epoch, response.events[0].event_id) == (fake_engine.epoch, 0)
    assert response.events[0].HasField("created")


async def test_many_events_arrive_in_parts_without_a_gap(client, ring):
    fake_engine = engine(ring, "a")
    fake_engine.events = EventLog(3 * MAX_EVENTS, 8, 4)
    store(fake_engine.events, *range(1, 2 * MAX_EVENTS + 10))
    events = await read(follow(client, "a"), 2 * MAX_EVENTS + 10)
    assert events == [("a", number, 0) for number in range(2 * MAX_EVENTS + 10)]


async def test_no_events_are_requested_for_a_client_that_does_not_read(client, ring):
    """Its events take no memory in the router. Once it reads again, dropped events show as a gap."""
    fake_engine = engine(ring, "a")
    fake_engine.events = EventLog(2 * MAX_EVENTS, 8, 4)
    call = follow(client, "a")
    await call.initial_metadata()
    number, rounds_without_reads = 1, 0
    # Until the client's window and the server's buffer are full.
    while rounds_without_reads < 4:
        reads_before = len(fake_engine.reads)
        store(fake_engine.events, *range(number, number + 2 * MAX_EVENTS))
        number += 2 * MAX_EVENTS
        await asyncio.sleep(0.25)
        rounds_without_reads = rounds_without_reads + 1 if len(fake_engine.reads) == reads_before else 0
    events = await read(call, 1)
    while events[-1][1] < number - 1:
        events += await read(call, 1)
    gaps = [dropped for _, _, dropped in events]
    assert sum(gaps) + len(events) == number
    assert any(gaps)


@pytest.mark.parametrize(
    ("engine_id", "message"),
    [("unknown", "must be empty or one of 'a, b, c'"), ("c", "--set engine.kv_event_buffer=10000")],
)
async def test_an_engine_without_events_is_refused(client, engine_id, message):
    details = await refused(follow(client, engine_id).read())
    assert details.info.reason == "INVALID_ARGUMENT"
    assert details.fields == ["engine_id"]
    assert message in details.bad.field_violations[0].description


async def test_too_many_readers_are_refused(client, monkeypatch):
    monkeypatch.setattr(cache_events, "MAX_READERS", 1)
    first = follow(client)
    await first.initial_metadata()
    assert (await refused(follow(client).read())).info.reason == "OVERLOADED"
    first.cancel()
