"""Traces of requests, received by a collector that is a real gRPC server."""

import sys
import time
from functools import partial

import pytest

from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import SamplingParams
from tests.fakes.collector import attributes, collect
from tests.fakes.ring_scripts import generate, hang
from tests.router.conftest import refused, text_spec

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
PHASES = ["queue", "prefill", "decode", "detokenize"]


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr("router.trace_queue.BATCH_SECONDS", 0.02)
    with collect() as collector:
        yield collector


@pytest.fixture
async def client(ring, start, collector):
    ring.add_engine()
    ring.add_detokenizer()
    return await start(otlp_endpoint=collector.address)


def called(traceparent=TRACEPARENT):
    return {"metadata": (("traceparent", traceparent),)}


async def tree(client, collector, line):
    """The span and child spans of the request with this log line."""
    await client.until(lambda: collector.tree(line["trace_id"]))
    spans_by_parent = collector.tree(line["trace_id"])
    (root,) = next(spans for parent, spans in spans_by_parent.items() if parent in ("", PARENT))
    return root, spans_by_parent.get(root.span_id.hex(), [])


async def test_a_span_tree_in_the_callers_trace(client, collector):
    time_before = time.time_ns()
    spec = text_spec(request_id="r", sampling=SamplingParams(temperature=0.5, seed=7))
    await client.events(spec, metadata=(("traceparent", TRACEPARENT), ("x-sluice-tenant", "search")))
    (line,) = client.lines()
    assert line["trace_id"] == TRACE
    root, children = await tree(client, collector, line)
    assert root.parent_span_id.hex() == PARENT
    assert (root.name, root.kind, root.status.code) == ("text_completion tiny", root.SPAN_KIND_SERVER, 0)
    assert [span.name for span in children] == PHASES
    assert time_before <= root.start_time_unix_nano < root.end_time_unix_nano <= time.time_ns()
    previous_end = root.start_time_unix_nano
    for span in children:
        assert span.start_time_unix_nano == previous_end
        previous_end = span.end_time_unix_nano
        assert span.start_time_unix_nano <= previous_end
    assert previous_end <= root.end_time_unix_nano
    span_attributes = attributes(root)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "r",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.output_tokens": 24,
        "gen_ai.usage.input_tokens": line["prompt_tokens"],
        "gen_ai.response.finish_reasons": ("length",),
        "sluice.tenant": "search",
        "sluice.engine": "engine",
        "sluice.detokenizer": "detok",
        "sluice.attempts": 1,
        "sluice.outcome": "LENGTH",
    }
    assert {name: span_attributes[name] for name in expected} == expected
    assert "error.type" not in span_attributes
    assert collector.resources[0]["service.name"] == "sluice-router"
    assert collector.resources[0]["service.instance.id"] == client.router.settings.id


async def test_without_a_traceparent_a_new_trace_begins(client, collector):
    for traceparent in (
        "",
        "nonsense",
        f"00-{'0' * 32}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-x",
    ):
        await client.generate(pb.GenerationSpec(text="def f(x):"), **called(traceparent))
    lines = client.lines()
    assert len({line["trace_id"] for line in lines} - {TRACE}) == len(lines)
    root, children = await tree(client, collector, lines[0])
    assert root.parent_span_id == b""
    assert len(children) == len(PHASES)


async def test_a_caller_that_does_not_sample_gets_no_spans(client, collector):
    await client.generate(text_spec(), **called(f"00-{TRACE}-{PARENT}-00"))
    await client.generate(text_spec())
    (unsampled, sampled) = client.lines()
    assert unsampled["trace_id"] == TRACE
    await tree(client, collector, sampled)
    assert collector.tree(TRACE) == {}


async def test_refused_and_failed_requests(client, collector, ring):
    await refused(client.generate(text_spec(n=1000), **called()))
    (line,) = client.lines()
    assert (line["outcome"], line["trace_id"]) == ("INVALID_ARGUMENT", TRACE)
    root, children = await tree(client, collector, line)
    assert (root.status.code, attributes(root)["error.type"], children) == (2, "INVALID_ARGUMENT", [])
    ring.script = hang
    call = client.stream(text_spec())
    await client.until(lambda: ring.calls)
    call.cancel()
    await client.until(lambda: len(client.lines()) == 2)
    root, children = await tree(client, collector, client.lines()[1])
    assert attributes(root)["error.type"] == "CANCELLED"
    assert [span.name for span in children] == ["queue", "prefill"]


async def test_a_recovery_shows_each_attempt(ring, start, collector, quick_recovery):
    for name in ("a", "b"):
        ring.add_engine(name).moving = True
    ring.add_detokenizer()
    client = await start(otlp_endpoint=collector.address, peer_timeout=0.6, stall_timeout=0.4)
    ring.script = partial(generate, pause=0.1)
    call = client.stream(text_spec(request_id="moved"), **called())
    await client.until(lambda: any(request.log.received > 2 for request in client.router.ring.requests.open))
    frozen = ring.calls[0].engine
    frozen.beating = False
    events = [event async for event in call]
    assert events[-1].WhichOneof("event") == "done"
    (line,) = client.lines()
    (lost,) = client.lines("attempt_given_up")
    assert line["attempts"] == 2
    assert lost["trace_id"] == line["trace_id"] == TRACE
    root, children = await tree(client, collector, line)
    first, second = (span for span in children if span.name == "attempt")
    first_attributes = attributes(first)
    assert (first_attributes["sluice.attempt"], first_attributes["sluice.engine"]) == (0, frozen.name)
    assert (first.status.code, first.status.message) == (2, "ENGINE_LOST")
    assert attributes(second)["sluice.engine"] != first_attributes["sluice.engine"]
    assert second.status.code == 0
    assert second.start_time_unix_nano >= first.end_time_unix_nano
    (event,) = root.events
    assert (event.name, event.time_unix_nano) == ("recovery", first.end_time_unix_nano)
    assert root.status.code == 0
    assert [span.name for span in children if span.name != "attempt"] == PHASES


async def test_a_hand_over_shows_both_engines(ring, start, collector):
    for name, phase in (("a", "prefill"), ("b", "decode")):
        engine = ring.add_engine(name)
        engine.phase, engine.kv_group = phase, "g"
    ring.add_detokenizer()
    client = await start(otlp_endpoint=collector.address)
    await client.events(pb.GenerationSpec(token_ids=pb.TokenIds(ids=range(500))), **called())
    (line,) = client.lines()
    root, children = await tree(client, collector, line)
    first, second = (span for span in children if span.name == "attempt")
    assert [attributes(span)["sluice.engine"] for span in (first, second)] == ["a", "b"]
    assert (first.status.code, second.status.code) == (0, 0)
    (event,) = root.events
    assert (event.name, event.time_unix_nano) == ("hand_over", first.end_time_unix_nano)
    assert (attributes(root)["sluice.prefill_engine"], attributes(root)["sluice.engine"]) == ("a", "b")


async def test_without_an_endpoint_a_callers_trace_is_still_in_the_log(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    await client.generate(text_spec(), **called())
    await client.generate(text_spec())
    first, second = client.lines()
    assert first["trace_id"] == TRACE
    assert "trace_id" not in second


async def test_without_the_packages_the_router_says_which_extra_it_needs(ring, start, monkeypatch):
    monkeypatch.setitem(sys.modules, "router.otlp", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(RuntimeError, match=r"otlp_endpoint needs the extra otel: pip install 'sluice-serve\[otel\]'"):
        await start(wait=False, otlp_endpoint="http://127.0.0.1:4317")
