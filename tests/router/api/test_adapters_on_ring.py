"""LoRA adapters on a ring: several routers, engines that lose files or die, configured adapters."""

import asyncio
import time

import pytest
from grpc import StatusCode

from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import SamplingParams
from sluice.wire.adapters import Adapter, AdapterEntries, AdapterEntry
from tests.router.api.adapter_calls import A, B, libraries, listed, load, weights
from tests.router.conftest import refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway

pytestmark = pytest.mark.usefixtures("quick_recovery")


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


async def test_every_router_and_a_new_engine_know_what_is_loaded(ring, serving, start, folder):
    client = await serving()
    other_client = await start(listen=f"ipc://{folder}/other")
    await load(client, "x", "/a")
    await load(client, "y", "/b")
    await other_client.until(lambda: other_client.router.ring.adapters.find("y") is not None)
    await other_client.models.UnloadLora(admin.UnloadLoraRequest(lora_id="x"))
    await client.until(lambda: client.router.ring.adapters.find("x") is None)
    # A new process at the engine's address knows no adapters until a router sends them.
    (engine,) = ring.engines.values()
    engine.epoch += 1
    engine.serve_adapters().folders["/b"] = B
    await client.until(
        lambda: {entry.id for entry in (engine.adapters.changes_since(0) or NO_CHANGES).entries} == {"x", "y"}
    )
    assert (await client.events(text_spec(lora_id="y")))[-1].HasField("done")


class NO_CHANGES:  # noqa: N801 - stands for a message without entries
    entries = ()


async def test_a_resumed_stream_keeps_its_original_weights(ring, serving):
    client = await serving()
    await load(client, "x", "/a")
    await load(client, "x", "/b")

    def resume(fingerprint):
        return [pb.ResumeFrom(token_ids=[1, 2], model_fingerprint=fingerprint)]

    seed = SamplingParams(seed=1)
    await client.events(text_spec(lora_id="x", sampling=seed, resume=resume(f"fingerprint.{A.version}")))
    assert ring.calls[-1].submit.adapter.version == A.version
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
    assert {call.submit.adapter.version for call in ring.calls} == {A.version}
    assert len(ring.calls) > 1


async def test_configured_adapters_are_loaded_from_the_start(serving):
    client = await serving(lora_adapters={"sql": "/a", "bad": "/nowhere"})
    await client.until(lambda: client.router.ring.adapters.find("sql") is not None)
    await client.until(lambda: client.lines("adapter_not_loaded"))
    assert client.lines("adapter_not_loaded")[0]["adapter"] == "bad"


@pytest.mark.parametrize("removed", [False, True])
async def test_a_change_by_a_call_takes_precedence_over_the_settings(ring, serving, removed):
    """Even if this router learns of the change only after it has loaded the configured adapters."""
    client = await serving(lora_adapters={"x": "/a"})
    adapters = client.router.ring.adapters
    await client.until(lambda: adapters.find("x") is not None)
    (engine,) = ring.engines.values()
    changed = AdapterEntry("x", time.time() - 60.0, B.version, "/b", 8, removed)
    engine.adapters.on_message(AdapterEntries(engine.epoch, [changed]))
    expected = None if removed else Adapter("x", B.version, "/b")
    await client.until(lambda: adapters.find("x") == expected)


async def test_a_request_that_arrives_before_any_heartbeat(ring, serving, start, folder, monkeypatch):
    client = await serving()
    await load(client, "x", "/a")
    (engine,) = ring.engines.values()
    await client.until(lambda: engine.adapters.changes_since(0) is not None)
    await client.router.stop(0.0)
    monkeypatch.setattr("router.peers.learning.LEARN_SECONDS", 60.0)
    other_client = await start(wait=False, listen=f"ipc://{folder}/other")
    specs = (text_spec(lora_id="x"), text_spec(model="x"))
    for events in await asyncio.gather(*map(other_client.events, specs)):
        assert events[0].started.model_fingerprint == f"fingerprint.{A.version}"


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
