"""AdminService.CallEngines: the answers of fake engines, and every way in which an answer can be missing."""

import asyncio
import re

import pytest

from sluice.v1 import admin_pb2 as pb
from sluice.wire.calls import MAX_JSON_BYTES, MAX_RANKS, CallAnswer, MethodCall, RankAnswer, failed
from tests.router.conftest import refused


@pytest.fixture
async def client(ring, start):
    """Engines "b" and "a", in this order, of two ranks each."""
    for name in ("b", "a"):
        ring.add_engine(name).answer_call = lambda call: [
            RankAnswer(rank, call.args) for rank in range(2) if call.names(rank)
        ]
    ring.add_detokenizer()
    client = await start(peer_timeout=1.0)
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    return client


def engine(ring, name):
    return next(engine for engine in ring.engines.values() if engine.name == name)


async def answers(client, method="echo", **fields) -> list[tuple]:
    """(engine, rank, value or error)."""
    response = await client.admin.CallEngines(pb.CallEnginesRequest(method=method, **fields))
    return [
        (
            answer.engine_id,
            answer.rank if answer.HasField("rank") else None,
            getattr(answer, answer.WhichOneof("result")),
        )
        for answer in response.answers
    ]


async def test_every_rank_of_every_engine_answers_in_order(client):
    assert await answers(client, args_json='["é"]') == [
        ("a", 0, '["é"]'),
        ("a", 1, '["é"]'),
        ("b", 0, '["é"]'),
        ("b", 1, '["é"]'),
    ]
    assert await answers(client, ranks=[1]) == [("a", 1, "[]"), ("b", 1, "[]")]


async def test_engines_get_the_call_as_sent(client, ring):
    received = []
    for fake_engine in ring.engines.values():
        fake_engine.answer_call = lambda call: received.append(call) or []
    await answers(client, "some.thing", args_json="[1]", kwargs_json='{"a": 2}', ranks=[3, 1])
    assert received == [MethodCall("some.thing", "[1]", '{"a": 2}', (3, 1))] * 2


async def test_an_error_names_engine_rank_and_method(client, ring):
    engine(ring, "a").answer_call = lambda _: [RankAnswer(0, "1"), failed(1, "ValueError: no")]
    results = await answers(client)
    assert results[:2] == [("a", 0, "1"), ("a", 1, "a, rank 1, echo: ValueError: no")]
    assert [results[2][0], results[3][0]] == ["b", "b"]


async def test_an_engine_that_does_not_answer(client, ring):
    engine(ring, "b").answer_call = lambda _: None
    results = await answers(client, timeout={"nanos": 300_000_000})
    assert results[-1] == ("b", None, "b, echo: no answer within 0.3 s; it may have run the method")
    assert not client.router.ring.calls._pending


async def test_a_late_answer_is_ignored(client, ring):
    b = engine(ring, "b")
    assert b.lane(client.router.ring.address).send(CallAnswer(b.epoch, 12345, [RankAnswer(0, "1")]))
    await client.until(lambda: client.lines("late_call_answer"))


async def test_an_engine_that_dies_during_the_call(client, ring):
    def die(_):
        engine(ring, "b").beating = False

    engine(ring, "b").answer_call = die
    results = await answers(client)
    assert [result[:2] for result in results[:2]] == [("a", 0), ("a", 1)]
    assert results[2:] == [("b", None, "b, echo: the engine was lost; it may have run the method")]


async def test_an_engine_that_is_replaced_during_the_call(client, ring):
    def restart(_):
        engine(ring, "b").epoch += 1

    engine(ring, "b").answer_call = restart
    results = await answers(client)
    assert results[2:] == [("b", None, "b, echo: the engine was lost; it may have run the method")]


async def test_an_engine_that_is_lost_behind_a_full_lane(client, ring, monkeypatch):
    b = next(peer for peer in client.router.ring.membership.engines.alive if peer.name == "b")
    monkeypatch.setattr(b.lane, "send", lambda _: False)
    call = asyncio.ensure_future(answers(client))
    await client.until(lambda: client.router.ring.calls._pending)
    engine(ring, "b").beating = False
    assert (await call)[2:] == [("b", None, "b, echo: the engine was lost; the method was not sent to it")]


async def test_a_full_lane(client, monkeypatch):
    for peer in client.router.ring.membership.engines.alive:
        monkeypatch.setattr(peer.lane, "send", lambda _: False)
    results = await answers(client, timeout={"nanos": 200_000_000})
    assert results[0] == ("a", None, "a, echo: no answer within 0.2 s; the method was not sent to it")


async def test_a_caller_that_disconnects_leaves_no_state(client, ring):
    engine(ring, "b").answer_call = lambda _: None
    call = client.admin.CallEngines(pb.CallEnginesRequest(method="echo"))
    await client.until(lambda: client.router.ring.calls._pending)
    call.cancel()
    await client.until(lambda: not client.router.ring.calls._pending)
    await asyncio.wait([asyncio.ensure_future(call.code())])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": ""}, "method: is '', must be 1 to 128 characters of A-Z a-z 0-9 _ . : -"),
        ({"method": "x" * 129}, "method: is 'xxxx"),
        ({"method": "a b"}, "method: is 'a b'"),
        ({"args_json": "{}"}, "args_json: is '{}', must be an array"),
        ({"args_json": "[NaN]"}, "args_json: cannot be read as JSON: NaN is not JSON"),
        ({"kwargs_json": "[]"}, r"kwargs_json: is '\[\]', must be an object"),
        ({"kwargs_json": "{"}, "kwargs_json: cannot be read as JSON: "),
        (
            {"args_json": f'["{"x" * MAX_JSON_BYTES}"]'},
            f"has {MAX_JSON_BYTES + 6} bytes together, at most {MAX_JSON_BYTES} are allowed",
        ),
        ({"ranks": [MAX_RANKS]}, f"ranks: names rank {MAX_RANKS}, must be below {MAX_RANKS}"),
        ({"ranks": [0] * (MAX_RANKS + 1)}, f"ranks: has {MAX_RANKS + 1} ranks, at most {MAX_RANKS} are allowed"),
        ({"timeout": {"seconds": 3601}}, r"timeout: is 3601 s, must be in \(0, 3600\] s"),
        ({"timeout": {}}, "timeout: is 0 s"),
    ],
)
async def test_invalid_calls_are_refused(client, fields, expected):
    details = await refused(client.admin.CallEngines(pb.CallEnginesRequest(**{"method": "echo"} | fields)))
    assert details.info.reason == "INVALID_ARGUMENT"
    assert details.bad.field_violations
    assert re.search(expected, details.error.details())


async def test_without_engines(start):
    client = await start(wait=False)
    details = await refused(client.admin.CallEngines(pb.CallEnginesRequest(method="ping")))
    assert details.info.reason == "NO_ENGINE"
