"""Requests go to the engine that has their prefix cached, as reported in heartbeats. On the fake ring."""

import asyncio

import pytest

from router.peers.prefix_index import SLICE_BLOCKS
from sluice.ring.hashing import block_chain, root_hash, short_hash
from sluice.ring.heartbeats import Hello
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from tests.fakes.cache_journal import FakeJournal

PROMPT = list(range(100, 420))
SIZE = 16


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("router.peers.membership.HELLO_SECONDS", 0.05)
    # Drop expected blocks as soon as they are computed, so that only reported blocks count as cached.
    monkeypatch.setattr("router.peers.prefix_index.CACHE_REPORT_SECONDS", 0.0)


@pytest.fixture
async def two(ring, start):
    """A router with two engines."""
    one, other = ring.add_engine("one"), ring.add_engine("other")
    ring.add_detokenizer()
    return await start(), one, other


def blocks(prompt, salt=""):
    return [short_hash(block) for block in block_chain(root_hash("fingerprint", salt), prompt, SIZE)]


def version(client, engine):
    return client.router.ring.placement.cache_version(engine.epoch)


async def caught_up(client, *engines):
    """Wait until the router knows all changes of the engines' caches."""
    await client.until(lambda: all(version(client, engine) == engine.journal.last for engine in engines))


async def engines_of(client, prompt, times=8, salt=""):
    """The engines of `times` successive requests. All are the same only if a cached prefix attracts the requests."""
    found = set()
    for _ in range(times):
        options = pb.KvCacheOptions(salt=salt)
        await client.generate(pb.GenerationSpec(token_ids=pb.TokenIds(ids=prompt), kv_cache=options))
        await client.until(lambda: not client.router.ring.requests.on_ring)
        found.add(client.lines()[-1]["engine"])
    return found


async def test_a_prefix_attracts_requests_to_the_engine_that_has_it_cached(two):
    client, one, other = two
    for holder, free in ((one, other), (other, one)):
        holder.journal.store(*blocks(PROMPT))
        free.journal.remove(*blocks(PROMPT))
        await caught_up(client, one, other)
        assert await engines_of(client, [*PROMPT, 7, 7, 7]) == {holder.name}


async def test_the_longer_prefix_wins(two):
    client, one, other = two
    one.journal.store(*blocks(PROMPT)[:5])
    other.journal.store(*blocks(PROMPT)[:6])
    await caught_up(client, one, other)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_another_salt_shares_nothing(two):
    client, one, other = two
    one.journal.store(*blocks(PROMPT, salt="a"))
    await caught_up(client, one, other)
    assert await engines_of(client, PROMPT, salt="a") == {"one"}
    assert await engines_of(client, PROMPT, times=40) == {"one", "other"}


async def test_an_evicted_prefix_attracts_no_requests(two):
    client, one, other = two
    one.journal.store(*blocks(PROMPT))
    other.journal.store(*blocks(PROMPT)[:2])
    await caught_up(client, one, other)
    one.journal.remove(*blocks(PROMPT))
    await caught_up(client, one, other)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_a_prefix_ends_at_the_first_missing_block(two):
    client, one, other = two
    one.journal.store(*blocks(PROMPT))
    one.journal.remove(blocks(PROMPT)[1])
    other.journal.store(*blocks(PROMPT)[:2])
    await caught_up(client, one, other)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_a_flush_empties_the_index(two):
    client, one, other = two
    one.journal.store(*blocks(PROMPT))
    await caught_up(client, one, other)
    await client.admin.FlushCache(admin_pb2.FlushCacheRequest())
    other.journal.store(blocks(PROMPT)[0])
    await caught_up(client, one, other)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_a_restarted_engine_starts_from_nothing(two):
    client, one, other = two
    one.journal.store(*blocks(PROMPT))
    await caught_up(client, one, other)
    former = one.epoch
    one.journal, one.epoch = FakeJournal(), former + 1
    other.journal.store(blocks(PROMPT)[0])
    await client.until(lambda: client.lines("peer_restarted"))
    await caught_up(client, one, other)
    assert (version(client, one), client.router.ring.placement.cache_version(former)) == (0, 0)
    assert await engines_of(client, PROMPT) == {"other"}
    one.journal.store(*blocks(PROMPT))
    await caught_up(client, one, other)
    assert await engines_of(client, PROMPT) == {"one"}


async def test_changes_in_lost_heartbeats_are_reported_again(two):
    client, one, other = two
    one.journal.store(*blocks(PROMPT)[:4])
    await caught_up(client, one, other)
    version_before = version(client, one)
    one.journal.store(*blocks(PROMPT)[4:])
    lost = one.journal.changes_since(version_before)
    one.journal.remove(*blocks(PROMPT)[10:])
    # A heartbeat that continues after the lost one.
    client.router.ring.placement.on_engine_heartbeat(
        one.heartbeat(Hello("router", client.router.ring.address, lost.last))
    )
    assert not client.router.ring.placement.update_cache()
    await caught_up(client, one, other)
    other.journal.store(*blocks(PROMPT)[:11])
    await caught_up(client, one, other)
    assert await engines_of(client, PROMPT) == {"other"}


async def test_a_router_that_starts_later_gets_the_whole_cache(two, ring, start):
    client, one, other = two
    one.journal = FakeJournal(max_kept=10)
    one.journal.store(*blocks(PROMPT))
    one.journal.store(*range(3 * SLICE_BLOCKS))
    other.journal.store(blocks(PROMPT)[0])
    late = await start(listen=f"ipc://{ring.folder}/late", id="late")
    for router in (late, client):
        await caught_up(router, one, other)
        assert await engines_of(router, PROMPT) == {"one"}


async def test_requests_are_served_while_many_changes_are_applied(two, ring):
    client, one, other = two
    one.journal.store(*range(8 * SLICE_BLOCKS))
    requests = (client.generate(pb.GenerationSpec(token_ids=pb.TokenIds(ids=[i + 1]))) for i in range(8))
    await asyncio.gather(*requests, caught_up(client, one, other))
    assert len(ring.calls) == 8
