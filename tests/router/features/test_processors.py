"""Requests with logits processors are placed on engines that have these."""

import asyncio

from grpc import StatusCode

from sluice.v1 import admin_pb2
from sluice.v1.sampling_pb2 import SamplingParams
from tests.fakes.ring_scripts import hang
from tests.router.conftest import refused, text_spec


def spec_with(*names: str):
    return text_spec(sampling=SamplingParams(logits_processors=names), client_id=5)


async def test_requests_go_to_engines_that_have_all_their_processors(ring, start):
    capable, partial, _ = map(ring.add_engine, ("having", "partly", "without"))
    capable.logits_processors, partial.logits_processors = ["a", "b"], ["a"]
    ring.add_detokenizer()
    client = await start()
    await asyncio.gather(*(client.events(spec_with("b", "a")) for _ in range(6)))
    assert len(capable.calls) == 6
    assert capable.calls[0].submit.sampling.logits_processors == ("b", "a")
    assert capable.calls[0].submit.extras.client_id == 5
    info = await client.models.GetModelInfo(admin_pb2.GetModelInfoRequest())
    assert list(info.model.logits_processors) == ["a", "b"]


async def test_an_unknown_processor_is_named_with_the_known_ones(ring, start):
    ring.add_engine().logits_processors = ["a", "b"]
    ring.add_detokenizer()
    client = await start()
    details = await refused(client.events(spec_with("a", "c")))
    assert details.fields == ["spec.sampling.logits_processors[1]"]
    assert details.bad.field_violations[0].description == "is 'c', must be one of: a, b"
    assert not ring.calls


async def test_a_processor_of_a_lost_engine_is_known_and_waited_for(ring, start):
    capable, _ = map(ring.add_engine, ("having", "without"))
    capable.logits_processors = ["a"]
    ring.add_detokenizer()
    client = await start(peer_timeout=1.0, peer_wait=0.3)
    capable.beating = False
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 1)
    details = await refused(client.events(spec_with("a")))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
    assert "that supports logits processors 'a'" in details.error.details()
    capable.beating = True
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    assert (await client.events(spec_with("a")))[-1].HasField("done")
    assert len(capable.calls) == 1


async def test_processors_that_no_single_engine_has(ring, start):
    ring.add_engine("first").logits_processors = ["a"]
    ring.add_engine("second").logits_processors = ["b"]
    ring.add_detokenizer()
    client = await start(peer_wait=0.1)
    details = await refused(client.events(spec_with("a", "b")))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
    assert "that supports logits processors 'a', 'b'" in details.error.details()


async def test_max_tokens_depends_on_the_engines_that_have_the_processors(ring, start):
    capable, larger = map(ring.add_engine, ("having", "larger"))
    capable.logits_processors, capable.max_sequence_tokens = ["a"], 256
    ring.add_detokenizer()
    client = await start()
    await client.events(spec_with("a"))
    submit = capable.calls[0].submit
    assert submit.stopping.max_tokens == 256 - len(submit.prompt)
    assert not larger.calls


async def test_no_engine_without_the_processors_continues_a_request(ring, start, quick_recovery):
    capable, incapable = map(ring.add_engine, ("having", "without"))
    capable.logits_processors = ["a"]
    ring.add_detokenizer()
    client = await start(peer_timeout=1.0, recovery_timeout=0.3)
    ring.script = hang
    call = client.stream(spec_with("a"))
    assert (await call.read()).HasField("started")
    capable.beating = False
    details = await refused(call.read())
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "ENGINE_LOST")
    assert not incapable.calls
