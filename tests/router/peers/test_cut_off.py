"""An engine that cannot reach a detokenizer, while both of them send heartbeats."""

import pytest
from grpc import StatusCode

from tests.fakes.ring_scripts import generate, hang
from tests.router.conftest import nothing_left, refused, rest, text_spec


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("router.peers.membership.HELLO_SECONDS", 0.1)


async def test_its_streams_continue_with_another_detokenizer(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer("detok-0")
    ring.add_detokenizer("detok-1")
    client = await start()
    ring.script = hang
    call = client.stream(text_spec())
    await call.read()
    ring.script = generate
    cut = engine.calls[0].submit.detokenizer
    engine.cut_off = [cut]
    assert (await rest(call))[-1].HasField("done")
    assert [attempt.submit.detokenizer == cut for attempt in engine.calls] == [True, False]
    assert (await client.events(text_spec()))[-1].HasField("done")
    assert engine.calls[-1].submit.detokenizer != cut
    await client.until(lambda: nothing_left(client))


async def test_another_engine_that_reaches_the_detokenizer_is_used(ring, start):
    cut, other = ring.add_engine("engine-0"), ring.add_engine("engine-1")
    detokenizer = ring.add_detokenizer()
    client = await start()
    cut.cut_off = [detokenizer.address]
    await client.until(lambda: any(peer.heartbeat.cut_off for peer in client.router.ring.membership.engines.alive))
    for _ in range(4):
        assert (await client.events(text_spec()))[-1].HasField("done")
    assert (len(cut.calls), len(other.calls)) == (0, 4)


async def test_if_no_engine_reaches_it_streams_wait_and_new_requests_fail(ring, start):
    engine, detokenizer = ring.add_engine(), ring.add_detokenizer()
    client = await start(peer_wait=0.2)
    ring.script = hang
    call = client.stream(text_spec())
    await call.read()
    engine.cut_off = [detokenizer.address]
    await client.until(lambda: client.router.ring.dispatcher.between_attempts)
    details = await refused(client.events(text_spec()))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_DETOKENIZER")
    ring.script = generate
    engine.cut_off = []
    assert (await rest(call))[-1].HasField("done")
    await client.until(lambda: nothing_left(client))
