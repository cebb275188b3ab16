"""Requests that name logits processors go to engines that have them."""

import asyncio

from sluice.v1 import admin_pb2
from sluice.v1.sampling_pb2 import SamplingParams
from tests.router.conftest import refused, text_spec


def asking(*names: str):
    return text_spec(sampling=SamplingParams(logits_processors=names), client_id=5)


async def test_they_go_to_engines_that_have_all_of_them(ring, start):
    having, partly, _ = map(ring.add_engine, ("having", "partly", "without"))
    having.logits_processors, partly.logits_processors = ["a", "b"], ["a"]
    ring.add_detokenizer()
    client = await start()
    await asyncio.gather(*(client.events(asking("b", "a")) for _ in range(6)))
    assert len(having.calls) == 6
    assert having.calls[0].submit.sampling.logits_processors == ("b", "a")
    assert having.calls[0].submit.client_id == 5
    info = await client.models.GetModelInfo(admin_pb2.GetModelInfoRequest())
    assert list(info.model.logits_processors) == ["a", "b"]


async def test_an_unknown_one_is_named_with_the_known_ones(ring, start):
    ring.add_engine().logits_processors = ["a", "b"]
    ring.add_detokenizer()
    client = await start()
    details = await refused(client.events(asking("a", "c")))
    assert details.fields == ["spec.sampling.logits_processors[1]"]
    assert details.bad.field_violations[0].description == "is 'c', must be one of: a, b"
    assert not ring.calls
