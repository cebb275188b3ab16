"""Requests that kill engines: where a router runs them next, and when it ends them."""

import asyncio

import pytest
from grpc import StatusCode

from sluice.client.errors import Poison, from_rpc_error
from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import Fault, FinishReason
from sluice.wire.requests import PROBATION_TOKENS
from tests.fakes.ring_scripts import Call, end, generate
from tests.router.conftest import nothing_left, refused, text_spec
from tests.router.requests.broken_attempts import IDS, check_whole, tokens

pytestmark = pytest.mark.usefixtures("quick_recovery")
POISON = 666


class DyingEngines:
    """Engines that restart when they get a prompt that contains POISON."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        """The engine dies before this token."""
        self.deaths: list[Call] = []
        self.may_continue = asyncio.Event()
        """If not set, an engine that runs a request alone survives."""
        self.may_continue.set()

    async def __call__(self, call: Call) -> None:
        submit, engine = call.submit, call.engine
        if submit.alone:
            engine.quarantine = submit.request
            await engine.report_state()
            await self.may_continue.wait()
        if POISON not in submit.prompt:
            engine.quarantine = None
            await self.neighbour(call)
            return
        for offset in range(len(submit.resume.get(0, ())), self.at):
            await call.send(tokens(call, 0, offset), start=True)
            if offset == PROBATION_TOKENS + len(submit.resume.get(0, ())):
                engine.quarantine = None
        await engine.report_state()
        self.deaths.append(call)
        engine.quarantine = None
        engine.epoch += 1

    async def neighbour(self, call: Call) -> None:
        await generate(call)


@pytest.fixture
async def two_engines(ring, start):
    """Long timeouts, so that a busy machine does not look like a death."""
    for name in ("a", "b"):
        ring.add_engine(name)
        ring.add_detokenizer(f"detok-{name}")
    return await start(peer_timeout=60.0, stall_timeout=60.0)


def poison(**fields):
    spec = text_spec(**fields)
    spec.token_ids.ids.extend([1, 2, POISON])
    return spec


@pytest.mark.parametrize(("at", "deaths"), [(0, 2), (8, 3)])
async def test_after_two_deaths_in_a_row_it_ends(two_engines, ring, at, deaths):
    ring.script = script = DyingEngines(at)
    details = await refused(two_engines.events(poison(output=IDS)))
    assert (details.code, details.info.reason, details.retry) == (StatusCode.INTERNAL, "POISON", None)
    assert details.info.metadata["engine_deaths"] == "2"
    assert isinstance(from_rpc_error(details.error), Poison)
    assert [call.submit.alone for call in script.deaths] == [False] * (deaths - 1) + [True]
    await two_engines.until(lambda: nothing_left(two_engines))
    suspects = two_engines.router.ring.suspects
    assert (suspects.poisoned, suspects.quarantines, suspects._held, suspects._waiting) == (1, 1, None, set())
    assert len(two_engines.lines("quarantine_entered")) == len(two_engines.lines("poison_request_ended")) == 1


@pytest.mark.parametrize(
    ("delivered", "alone"), [([7, 7, 12], [False, False, True, True]), ([0, 12], [False, True, True])]
)
async def test_tokens_lost_earlier_do_not_clear_a_suspect(two_engines, ring, delivered, alone):
    """They were sampled and lost when engines died under earlier attempts. Here the 13th token kills each engine."""

    class Lossy(DyingEngines):
        async def __call__(self, call):
            died = len(self.deaths)
            self.at = delivered[died] if died < len(delivered) else 12
            if died == 0 and self.at:
                await call.send(tokens(call, 0, 0, self.at), start=True)
                self.at = 0
            await super().__call__(call)

    ring.script = script = Lossy()
    spec = poison(output=pb.OutputOptions(token_ids=True, stream_interval=7))
    details = await refused(two_engines.events(spec))
    assert (details.info.reason, details.info.metadata["engine_deaths"]) == ("POISON", "3")
    assert [call.submit.alone for call in script.deaths] == alone


async def test_a_request_that_ran_on_a_dying_engine_by_chance_continues(two_engines, ring):
    class Once(DyingEngines):
        async def neighbour(self, call):
            if call.submit.attempt == 0:
                call.engine.epoch += 1
            else:
                await generate(call)

    ring.script = Once()
    check_whole(await two_engines.events(text_spec(output=IDS)), ring.calls[0].submit, 1)
    assert {call.submit.attempt: call.submit.alone for call in ring.calls} == {0: False, 1: True}
    assert two_engines.router.ring.suspects._held is None


async def test_an_engine_that_disconnected_and_fell_silent_has_died(two_engines, ring):
    class Once(DyingEngines):
        async def neighbour(self, call):
            if call.submit.attempt == 0:
                await call.engine.close()
            else:
                await generate(call)

    ring.script = Once()
    check_whole(await two_engines.events(text_spec(output=IDS)), ring.calls[0].submit, 1)
    assert {call.submit.attempt: call.submit.alone for call in ring.calls} == {0: False, 1: True}


async def test_an_engine_that_drained_before_its_end_has_not_died(two_engines, ring):
    class Once(DyingEngines):
        async def neighbour(self, call):
            if call.submit.attempt == 0:
                call.engine.draining = True
                await call.engine.report_state()
                call.engine.epoch += 1
                call.engine.draining = False
            else:
                await generate(call)

    ring.script = Once()
    check_whole(await two_engines.events(text_spec(output=IDS)), ring.calls[0].submit, 1)
    assert not any(call.submit.alone for call in ring.calls)


async def test_no_request_is_placed_alongside_a_suspect(two_engines, ring):
    ring.script = script = DyingEngines()
    script.may_continue.clear()
    held = asyncio.Event()

    async def hold(call):
        await held.wait()
        await generate(call)

    script.neighbour = hold
    dying = asyncio.create_task(refused(two_engines.events(poison())))
    await two_engines.until(lambda: any(call.submit.alone for call in ring.calls))
    (alone,) = [call for call in ring.calls if call.submit.alone]
    neighbours = [asyncio.create_task(two_engines.events(text_spec(f"x{i}"))) for i in range(6)]
    await two_engines.until(lambda: sum(POISON not in call.submit.prompt for call in ring.calls) == 6)
    assert not any(call.engine is alone.engine for call in ring.calls if POISON not in call.submit.prompt)
    script.may_continue.set()
    assert (await dying).info.reason == "POISON"
    held.set()
    for neighbour in neighbours:
        assert (await neighbour)[-1].HasField("done")


async def test_a_refusal_because_of_quarantine_does_not_count_as_a_fruitless_attempt(client, ring):
    refusals = 0

    async def busy(call):
        nonlocal refusals
        refusals += 1
        if refusals > 20:
            await generate(call)
        else:
            fault = end(FinishReason.ERROR, fault=Fault("QUARANTINE", "another one runs alone"))
            await call.send(call.row(0, [], "", 0, fault), start=True)

    ring.script = busy
    assert (await client.events(text_spec()))[-1].HasField("done")


async def test_deaths_at_other_routers_are_passed_on_by_the_client(two_engines, ring):
    ring.script = script = DyingEngines()
    spec = poison(engine_deaths=1)
    details = await refused(two_engines.events(spec))
    assert details.info.metadata["engine_deaths"] == "3"
    # The client's count alone makes no suspect: an engine is reserved only after a death at this router.
    assert [call.submit.alone for call in script.deaths] == [False, True]


async def test_a_retryable_error_reports_the_number_of_deaths(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(recovery_timeout=0.3, peer_timeout=1.0)

    async def die(call):
        call.engine.epoch += 1
        await asyncio.sleep(0.1)
        call.engine.beating = False

    ring.script = die
    details = await refused(client.events(text_spec()))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "ENGINE_LOST")
    assert int(details.info.metadata["engine_deaths"]) >= 1


@pytest.mark.parametrize("deaths", [9, 1 << 31])
async def test_a_count_out_of_range_is_refused(client, deaths):
    details = await refused(client.events(text_spec(engine_deaths=deaths)))
    assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, ["spec.engine_deaths"])
