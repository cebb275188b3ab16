"""StreamSteps: the statistics in heartbeats reach every subscriber, and a slow subscriber's buffer is bounded."""

import asyncio

import msgspec

from router.api.stats_broadcast import StatsBroadcast, request_message, step_message
from sluice.v1 import admin_pb2
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.stats import RequestProgress, Stage, StepStats

REQUEST = RequestProgress(
    request=7,
    name="r",
    stage=Stage.GENERATION,
    arrival=1000.0,
    first_scheduled=1000.25,
    first_token=1000.5,
    last_token=1000.75,
    prompt_tokens=12,
    cached_tokens=4,
    generated_tokens=5,
    pauses=1,
    blocks_allocated=3,
    blocks_reused=2,
    blocks_missed=6,
)


def heartbeat_of(steps=(), requests=(), engine="engine") -> EngineHeartbeat:
    return EngineHeartbeat(engine, 1, "mem://", "f", 64, False, StepStats(), steps=list(steps), requests=list(requests))


def steps_of(*iterations: int) -> list[StepStats]:
    return [StepStats(iteration=iteration) for iteration in iterations]


def iterations(response: admin_pb2.StreamStepsResponse) -> list[int]:
    return [step.iteration for step in response.steps]


async def subscribe(client):
    call = client.admin.StreamSteps(admin_pb2.StreamStepsRequest())
    await call.initial_metadata()
    return call


def test_a_request_message_has_every_number():
    message = request_message("engine", REQUEST)
    assert (message.engine_id, message.request_id) == ("engine", "r")
    assert message.stage == admin_pb2.REQUEST_STAGE_GENERATION
    moments = [message.arrival, message.first_scheduled, message.first_token, message.last_token]
    assert [moment.ToMilliseconds() for moment in moments] == [1_000_000, 1_000_250, 1_000_500, 1_000_750]
    assert message.queued.ToMilliseconds() == 250
    shared_names = set(RequestProgress.__struct_fields__) & {field.name for field in message.DESCRIPTOR.fields}
    plain = shared_names - {"stage", "arrival", "first_scheduled", "first_token", "last_token"}
    assert {name: getattr(message, name) for name in plain} == {name: getattr(REQUEST, name) for name in plain}
    assert {field.name for field in message.DESCRIPTOR.fields} == shared_names | {"engine_id", "request_id", "queued"}
    assert {stage.value for stage in Stage} | {0} == set(admin_pb2.RequestStage.values())


def test_times_of_later_events_are_unset():
    waiting = msgspec.structs.replace(
        REQUEST, stage=Stage.QUEUED, first_scheduled=None, first_token=None, last_token=None
    )
    message = request_message("engine", waiting)
    assert not any(message.HasField(name) for name in ("first_scheduled", "first_token", "last_token"))
    assert message.queued.seconds > 1_000_000
    assert not step_message(heartbeat_of(), StepStats()).HasField("time")


async def test_steps_and_requests_of_all_engines_reach_every_subscriber(ring, start):
    first, second = ring.add_engine("a"), ring.add_engine("b")
    ring.add_detokenizer()
    client = await start()
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    calls = [await subscribe(client), await subscribe(client)]
    first.steps, second.steps, first.requests = steps_of(1, 2, 3), steps_of(1), [REQUEST]
    for call in calls:
        steps, requests = [], []
        while len(steps) < 4:
            response = await call.read()
            steps += [(step.engine_id, step.iteration) for step in response.steps]
            requests += [request.request_id for request in response.requests]
        assert sorted(steps) == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
        assert requests == ["r"]
        call.cancel()
    await client.until(lambda: client.router._stats_broadcast.subscribers == 0)


async def test_earlier_statistics_are_not_sent(client, ring):
    (engine,) = ring.engines.values()
    call = await subscribe(client)
    engine.steps = steps_of(1)
    assert iterations(await call.read()) == [1]
    late_call = await subscribe(client)
    engine.steps = steps_of(2)
    assert iterations(await late_call.read()) == [2]


async def test_a_slow_subscriber_loses_the_oldest_statistics_which_is_counted():
    broadcast = StatsBroadcast(3)
    with broadcast.subscribe() as slow, broadcast.subscribe() as fast:
        broadcast.on_heartbeat(heartbeat_of(steps_of(1, 2), [REQUEST]))
        assert iterations(await fast.next()) == [1, 2]
        broadcast.on_heartbeat(heartbeat_of(steps_of(3, 4)))
        assert iterations(await fast.next()) == [3, 4]
        assert broadcast.lost == 1
        response = await slow.next()
        assert (iterations(response), len(response.requests)) == ([2, 3, 4], 1)
    assert broadcast.subscribers == 0


async def test_a_subscriber_waits_while_engines_are_idle():
    broadcast = StatsBroadcast()
    with broadcast.subscribe() as listener:
        broadcast.on_heartbeat(heartbeat_of())
        waiting = asyncio.create_task(listener.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        broadcast.on_heartbeat(heartbeat_of(steps_of(1)))
        assert iterations(await waiting) == [1]
