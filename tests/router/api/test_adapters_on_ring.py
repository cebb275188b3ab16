"""LoRA adapters on a ring: several routers, engines that lose files or die, configured adapters."""

import asyncio

import pytest
from grpc import StatusCode

from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import SamplingParams
from tests.router.api.adapter_calls import A, B, libraries, listed, load, weights
from tests.router.conftest import refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway

pytestmark = pytest.mark.usefixtures("quick_sync")


async def test_uploaded_files_are_sent_again_to_an_engine_that_lost_them(ring, serving):
    client = await serving()
    await load(client, "x", files=A)
    (library,) = libraries(ring)
    library.host.clear()
    events = await client.events(text_spec(lora_id="x"))
    assert events[-1].HasField("done")
    assert library.host == {A.version: A}
    assert len(ring.calls) == 2


async def test_a_request_fails_if_neither_router_nor_engine_has_its_adapters_files(ring, serving, start, folder):
    client = await serving(recovery_attempts=2)
    await load(client, "x", files=A)
    other_client = await start(listen=f"ipc://{folder}/other")
    await other_client.until(lambda: other_client.router.ring.adapters.find("x") is not None)
    libraries(ring)[0].host.clear()
    details = await refused(other_client.events(text_spec(lora_id="x")))
    assert (details.code, details.info.reason) == (StatusCode.FAILED_PRECONDITION, "ADAPTER_MISSING")
    # The router that received the upload still has them.
    assert (await client.events(text_spec(lora_id="x")))[-1].HasField("done")


async def test_a_resumed_stream_keeps_its_original_weights(ring, serving):
    client = await serving()
    await load(client, "x", "/a")
    await load(client, "x", "/b")

    def resume(fingerprint):
        return [pb.ResumeFrom(token_ids=[1, 2], model_fingerprint=fingerprint)]

    seed = SamplingParams(seed=1)
    await client.events(text_spec(lora_id="x", sampling=seed, resume=resume(f"fingerprint.{A.version}")))
    assert ring.calls[-1].submit.extras.adapter.version == A.version
    for fields in (
        {"lora_id": "x", "resume": resume("fingerprint")},
        {"lora_weights": weights(A), "resume": resume("fingerprint")},
        {"resume": resume(f"fingerprint.{A.version}")},
    ):
        details = await refused(client.events(text_spec(sampling=seed, **fields)))
        assert (details.code, details.info.reason) == (StatusCode.FAILED_PRECONDITION, "MODEL_CHANGED")


async def test_after_an_engines_death_a_stream_keeps_its_weights_although_the_id_has_changed(ring, serving):
    client = await serving(engines=2)
    await load(client, "x", "/a")
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(lora_id="x", output=IDS)))
    await asyncio.wait_for(script.reached.wait(), 60)
    await load(client, "x", "/b")
    script.attempts[0].engine.epoch += 1
    check_whole(await task, script.attempts[0].submit, 1)
    assert {call.submit.extras.adapter.version for call in ring.calls} == {A.version}
    assert len(ring.calls) > 1


async def test_requests_wait_for_a_configured_adapter_which_is_loaded_once_its_engine_returns(
    ring, serving, monkeypatch
):
    monkeypatch.setattr("router.peers.learning.LEARN_SECONDS", 60.0)
    monkeypatch.setattr("router.peers.learning.RETRY_SECONDS", 0.05)
    client = await serving(lora_adapters={"x": "/a"})
    (engine,) = ring.engines.values()
    waiting = asyncio.ensure_future(client.events(text_spec(lora_id="x")))

    def die(_) -> None:
        engine.restart()
        engine.serve_adapters().folders["/a"] = A

    engine.adapters.on_message = die
    await client.until(lambda: client.lines("adapter_not_loaded"))
    assert (await waiting)[-1].HasField("done")


async def test_a_folder_whose_files_differ_between_engines_is_refused(ring, serving):
    client = await serving(engines=2)
    libraries(ring)[0].folders["/a"] = B
    details = await refused(load(client, "x", "/a"))
    assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, ["path"])
    assert not (await listed(client)).loras
