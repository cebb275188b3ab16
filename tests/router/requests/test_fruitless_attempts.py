"""Which attempts are followed by another one, how often, and on which peers."""

import pytest
from grpc import StatusCode

from sluice.wire.errors import Fault, FinishReason
from tests.fakes.ring_scripts import end, generate
from tests.router.conftest import nothing_left, refused, text_spec
from tests.router.requests.broken_attempts import IDS, LENGTH, check_whole, tokens

pytestmark = pytest.mark.usefixtures("quick_recovery")


async def test_attempts_without_tokens_are_bounded(client, ring):
    async def refuse(call):
        await call.send(call.row(0, [], "", 0, end(FinishReason.ERROR, fault=Fault("OVERLOADED", "full"))), start=True)

    ring.script = refuse
    call = client.stream(text_spec())
    details = await refused(call.read())
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert not await call.initial_metadata()
    assert [call.submit.attempt for call in ring.calls] == list(range(8))
    await client.until(lambda: nothing_left(client))
    assert client.lines()[0]["attempts"] == 8
    assert sum(client.router.ring.counters.recoveries.values()) == 7


async def test_attempts_with_tokens_are_not_bounded(client, ring):
    async def one_token(call):
        offset = len(call.submit.resume.get(0, ()))
        await call.send(tokens(call, 0, offset), start=True)
        if offset == LENGTH - 1:
            await call.send(call.row(LENGTH, [], "", 0, end(FinishReason.LENGTH)))
        else:
            failed = end(FinishReason.ERROR, fault=Fault("STEP_FAILED", "again"))
            await call.send(call.row(offset + 1, [], "", 0, failed))

    ring.script = one_token
    events = await client.events(text_spec(output=IDS))
    check_whole(events, ring.calls[0].submit, 1)
    assert len(ring.calls) == LENGTH
    assert client.router.ring.counters.recoveries == {"STEP_FAILED": LENGTH - 1}


async def test_tokens_in_the_row_of_a_fault_are_kept(client, ring):
    async def fail_after_three_tokens(call):
        if call.submit.attempt:
            return await generate(call)
        fault = end(FinishReason.ERROR, fault=Fault("ROWS_LOST", "a gap"))
        return await call.send(tokens(call, 0, 0, 3)._replace(end=fault), start=True)

    ring.script = fail_after_three_tokens
    check_whole(await client.events(text_spec(output=IDS)), ring.calls[0].submit, 1)
    assert len(ring.calls[1].submit.resume[0]) == 3


async def test_peers_that_refused_are_avoided_by_the_next_attempt(two_of_each, ring):
    async def full(call):
        if call.engine.name == "a":
            fault = end(FinishReason.ERROR, fault=Fault("OVERLOADED", "full"))
            await call.send(call.row(0, [], "", 0, fault), start=True)
        else:
            await generate(call)

    ring.script = full
    for i in range(8):
        events = await two_of_each.events(text_spec(f"x{i}"))
        assert events[-1].HasField("done")
        # The start of the refused attempt was not delivered.
        assert events[0].started.cached_tokens > 0
    assert all(call.submit.attempt <= 1 for call in ring.calls)
    assert {call.engine.name for call in ring.calls if call.submit.attempt} <= {"b"}


async def test_faults_of_the_request_itself_are_not_retried(client, ring):
    async def refuse(call):
        fault = end(FinishReason.ERROR, fault=Fault("TEXT_FAILED", "no"))
        await call.send(call.row(0, [], "", 0, fault), start=True)

    ring.script = refuse
    assert (await refused(client.events(text_spec()))).info.reason == "TEXT_FAILED"
    assert len(ring.calls) == 1
