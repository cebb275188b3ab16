"""Requests go to the engine that has their prefix cached, as reported in heartbeats. On the fake ring."""

import asyncio

import pytest

from router.peers.prefix_index import SLICE_BLOCKS
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.wire.hashing import block_chain, root_hash, short_hash
from sluice.wire.heartbeats import Hello
from tests.fakes.cache_journal import FakeJournal

PROMPT = list(range(100, 420))
SIZE = 16


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("router.peers.membership.HELLO_SECONDS", 0.05)
    # The index learns of blocks that a test's requests compute only from heartbeats.
    monkeypatch.setattr("router.peers.prefix_index.CACHE_REPORT_SECONDS", 0.0)


@pytest.fixture
async def two_engines(ring, start):
    """A router with two engines."""
    first, second = ring.add_engine("one"), ring.add_engine("other")
    ring.add_detokenizer()
    return await start(), first, second


def blocks(prompt, salt=""):
    return [short_hash(block) for block in block_chain(root_hash("fingerprint", salt), prompt, SIZE)]


def version(client, engine):
    return client.router.ring.placement.cache_version(engine.epoch)


async def caught_up(client, *engines):
    """Wait until the router knows all changes of the engines' caches."""
    await client.until(lambda: all(version(client, engine) == engine.journal.last for engine in engines))


async def engines_of(client, prompt, times=8, salt=""):
    """The engines of `times` successive requests. All are the same only if a cached prefix attracts the requests."""
    names = set()
    for _ in range(times):
        options = pb.KvCacheOptions(salt=salt)
        await client.generate(pb.GenerationSpec(token_ids=pb.TokenIds(ids=prompt), kv_cache=options))
        await client.until(lambda: not client.router.ring.requests.on_ring)
        names.add(client.lines()[-1]["engine"])
    return names


async def test_a_prefix_attracts_requests_to_the_engine_that_has_it_cached(two_engines):
    client, first, second = two_engines
    for holder, free in ((first, second), (second, first)):
        holder.journal.store(*blocks(PROMPT))
        free.journal.remove(*blocks(PROMPT))
        await caught_up(client, first, second)
        assert await engines_of(client, [*PROMPT, 7, 7, 7]) == {holder.name}


async def test_the_longer_prefix_wins(two_engines):
    client, first, second = two_engines
    first.journal.store(*blocks(PROMPT)[:5])
    second.journal.store(*blocks(PROMPT)[:6])
    await caught_up(client, first, second)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_another_salt_shares_nothing(two_engines):
    client, first, second = two_engines
    first.journal.store(*blocks(PROMPT, salt="a"))
    await caught_up(client, first, second)
    assert await engines_of(client, PROMPT, salt="a") == {"one"}
    assert await engines_of(client, PROMPT, times=40) == {"one", "other"}


async def test_an_evicted_prefix_attracts_no_requests(two_engines):
    client, first, second = two_engines
    first.journal.store(*blocks(PROMPT))
    second.journal.store(*blocks(PROMPT)[:2])
    await caught_up(client, first, second)
    first.journal.remove(*blocks(PROMPT))
    await caught_up(client, first, second)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_a_prefix_ends_at_the_first_missing_block(two_engines):
    client, first, second = two_engines
    first.journal.store(*blocks(PROMPT))
    first.journal.remove(blocks(PROMPT)[1])
    second.journal.store(*blocks(PROMPT)[:2])
    await caught_up(client, first, second)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_a_flush_empties_the_index(two_engines):
    client, first, second = two_engines
    first.journal.store(*blocks(PROMPT))
    await caught_up(client, first, second)
    await client.admin.FlushCache(admin_pb2.FlushCacheRequest())
    second.journal.store(blocks(PROMPT)[0])
    await caught_up(client, first, second)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_a_restarted_engine_starts_from_nothing(two_engines):
    client, first, second = two_engines
    first.journal.store(*blocks(PROMPT))
    await caught_up(client, first, second)
    former = first.epoch
    first.journal, first.epoch = FakeJournal(), former + 1
    second.journal.store(blocks(PROMPT)[0])
    await client.until(lambda: client.lines("peer_restarted"))
    await caught_up(client, first, second)
    assert (version(client, first), client.router.ring.placement.cache_version(former)) == (0, 0)
    assert await engines_of(client, PROMPT) == {"other"}
    first.journal.store(*blocks(PROMPT))
    await caught_up(client, first, second)
    assert await engines_of(client, PROMPT) == {"one"}


async def test_changes_in_lost_heartbeats_are_reported_again(two_engines):
    client, first, second = two_engines
    first.journal.store(*blocks(PROMPT)[:4])
    await caught_up(client, first, second)
    version_before = version(client, first)
    first.journal.store(*blocks(PROMPT)[4:])
    lost = first.journal.changes_since(version_before)
    first.journal.remove(*blocks(PROMPT)[10:])
    # A heartbeat that continues after the lost one.
    client.router.ring.placement.on_engine_heartbeat(
        first.heartbeat(Hello("router", client.router.ring.address, lost.last))
    )
    assert not client.router.ring.placement.update_cache()
    await caught_up(client, first, second)
    second.journal.store(*blocks(PROMPT)[:11])
    await caught_up(client, first, second)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_a_router_that_starts_later_gets_the_whole_cache(two_engines, ring, start):
    client, first, second = two_engines
    first.journal = FakeJournal(max_kept=10)
    first.journal.store(*blocks(PROMPT))
    first.journal.store(*range(3 * SLICE_BLOCKS))
    second.journal.store(blocks(PROMPT)[0])
    late_client = await start(listen=f"ipc://{ring.folder}/late", id="late")
    for router in (late_client, client):
        await caught_up(router, first, second)
        assert await engines_of(router, PROMPT) == {"one"}


async def test_requests_are_served_while_many_changes_are_applied(two_engines, ring):
    client, first, second = two_engines
    first.journal.store(*range(8 * SLICE_BLOCKS))
    requests = (client.generate(pb.GenerationSpec(token_ids=pb.TokenIds(ids=[i + 1]))) for i in range(8))
    await asyncio.gather(*requests, caught_up(client, first, second))
    assert len(ring.calls) == 8
