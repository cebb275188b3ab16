"""LoRA adapters over real gRPC and ZeroMQ: loading, uploading, using them, and losing engines that hold them."""

import asyncio
import threading
import time
from hashlib import blake2b

import pytest
from grpc import StatusCode

from router.api.model_service import MAX_LOADS, MAX_UPLOADS
from sluice.ring.adapters import (
    MAX_ADAPTERS,
    PART_BYTES,
    Adapter,
    AdapterEntries,
    AdapterEntry,
    AdapterFiles,
    LoadAdapter,
)
from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import SamplingParams
from tests.fakes.library import files
from tests.router.conftest import refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway

pytestmark = pytest.mark.usefixtures("quick_recovery")

A, B = files("a"), files("b")


@pytest.fixture
def serving(ring, start):
    """Starts a router with engines that serve adapters and have the folders /a and /b."""

    async def serving(engines: int = 1, **settings):
        for number in range(engines):
            library = ring.add_engine(f"engine-{number}").serve_adapters()
            library.folders |= {"/a": A, "/b": B}
        ring.add_detokenizer()
        return await start(**{"lora_in_requests": True, **settings})

    return serving


def weights(files: AdapterFiles) -> pb.LoraWeights:
    return pb.LoraWeights(config_json=files.config, safetensors=files.weights)


async def load(client, name, path="", files=None) -> admin.Lora:
    source = {"path": path} if files is None else {"weights": weights(files)}
    return (await client.models.LoadLora(admin.LoadLoraRequest(lora_id=name, **source))).lora


async def listed(client, **page):
    return await client.models.ListLoras(admin.ListLorasRequest(**page))


def libraries(ring):
    return [engine.library for engine in ring.engines.values()]


async def test_a_folder_is_loaded_on_every_engine_and_used_by_its_id(ring, serving):
    client = await serving(engines=2)
    lora = await load(client, "sql", "/a")
    assert (lora.lora_id, lora.path, lora.rank, lora.version) == ("sql", "/a", 8, A.version)
    assert all(A.version in library.host for library in libraries(ring))
    for fields in ({"lora_id": "sql"}, {"model": "sql"}):
        events = await client.events(text_spec(**fields))
        assert events[0].started.model_fingerprint == f"fingerprint.{A.version}"
    await client.events(text_spec())
    submitted = [call.submit.adapter for call in ring.calls]
    assert sorted(map(str, submitted)) == sorted(map(str, [None, *2 * [Adapter("sql", A.version, "/a")]]))
    assert list((await listed(client)).loras) == [lora]


async def test_an_id_that_is_loaded_again_refers_to_the_new_weights(ring, serving):
    client = await serving()
    await load(client, "x", "/a")
    await load(client, "x", "/b")
    await client.events(text_spec(lora_id="x"))
    assert ring.calls[-1].submit.adapter.version == B.version
    await client.models.UnloadLora(admin.UnloadLoraRequest(lora_id="x"))
    details = await refused(client.events(text_spec(lora_id="x")))
    assert (details.code, details.info.reason, details.fields) == (
        StatusCode.NOT_FOUND,
        "ADAPTER_NOT_FOUND",
        ["spec.lora_id"],
    )
    details = await refused(client.models.UnloadLora(admin.UnloadLoraRequest(lora_id="x")))
    assert details.info.reason == "ADAPTER_NOT_FOUND"


async def test_an_upload_in_parts_and_in_one_message(ring, serving):
    client = await serving(engines=2)
    big = files("w", 3 * PART_BYTES)

    def parts():
        yield admin.UploadLoraRequest(header=admin.UploadLoraHeader(lora_id="big", config_json=big.config))
        for start in range(0, len(big.weights), 100_000):
            yield admin.UploadLoraRequest(data=big.weights[start : start + 100_000])

    assert (await client.models.UploadLora(parts())).lora.version == big.version
    assert (await load(client, "small", files=A)).version == A.version
    assert all(library.host == {big.version: big, A.version: A} for library in libraries(ring))


async def test_a_stalled_upload_frees_its_slot(serving, monkeypatch):
    monkeypatch.setattr("router.api.model_service.UPLOAD_SECONDS", 0.2)
    client = await serving()

    async def parts():
        yield admin.UploadLoraRequest(header=admin.UploadLoraHeader(lora_id="x", config_json=A.config))
        await asyncio.Event().wait()

    stopped = [refused(client.models.UploadLora(parts())) for _ in range(MAX_UPLOADS)]
    for details in await asyncio.gather(*stopped):
        assert details.info.reason == "SLOW_CLIENT"
        assert "within 0.2 s" in details.error.details()
    assert (await load(client, "x", files=A)).version == A.version
    upload = [admin.UploadLoraRequest(header=admin.UploadLoraHeader(lora_id="y", config_json=A.config))]
    upload.append(admin.UploadLoraRequest(data=A.weights))
    assert (await client.models.UploadLora(iter(upload))).lora.version == A.version


async def test_uploaded_files_are_sent_again_to_an_engine_that_lost_them(ring, serving):
    client = await serving()
    await load(client, "x", files=A)
    (library,) = libraries(ring)
    library.host.clear()
    events = await client.events(text_spec(lora_id="x"))
    assert events[-1].HasField("done")
    assert library.host == {A.version: A}
    assert len(ring.calls) == 2


async def test_a_request_fails_if_its_adapters_files_are_nowhere(ring, serving, start, folder):
    client = await serving(recovery_attempts=2)
    await load(client, "x", files=A)
    other = await start(listen=f"ipc://{folder}/other")
    await other.until(lambda: other.router.ring.adapters.find("x") is not None)
    libraries(ring)[0].host.clear()
    details = await refused(other.events(text_spec(lora_id="x")))
    assert (details.code, details.info.reason) == (StatusCode.FAILED_PRECONDITION, "ADAPTER_MISSING")
    # The router that received the upload still has them.
    assert (await client.events(text_spec(lora_id="x")))[-1].HasField("done")


async def test_every_router_and_a_new_engine_know_what_is_loaded(ring, serving, start, folder):
    client = await serving()
    other = await start(listen=f"ipc://{folder}/other")
    await load(client, "x", "/a")
    await load(client, "y", "/b")
    await other.until(lambda: other.router.ring.adapters.find("y") is not None)
    await other.models.UnloadLora(admin.UnloadLoraRequest(lora_id="x"))
    await client.until(lambda: client.router.ring.adapters.find("x") is None)
    # A new process at the engine's address knows no adapters until a router sends them.
    (engine,) = ring.engines.values()
    engine.epoch += 1
    engine.serve_adapters().folders["/b"] = B
    await client.until(
        lambda: {each.id for each in (engine.adapters.changes_since(0) or NO_CHANGES).entries} == {"x", "y"}
    )
    assert (await client.events(text_spec(lora_id="y")))[-1].HasField("done")


class NO_CHANGES:  # noqa: N801 - stands for a message without entries
    entries = ()


async def test_a_request_contains_its_adapter(ring, serving):
    client = await serving()
    events = await client.events(text_spec(lora_weights=weights(A)))
    assert events[0].started.model_fingerprint == f"fingerprint.{A.version}"
    assert libraries(ring)[0].host == {A.version: A}
    assert not (await listed(client)).loras
    assert client.router.ring.adapters.files.get(A.version) is not None
    # The files are no longer needed, so another upload may replace them.
    client.router.ring.adapters.files._limit = B.nbytes
    await load(client, "b", files=B)
    assert client.router.ring.adapters.files.get(A.version) is None


async def test_adapter_files_in_a_request_are_not_hashed_on_the_event_loop(serving, monkeypatch):
    """A hash of large files would delay all streams. The version must not depend on where it is computed."""
    client = await serving()
    threads = []

    def hashing(*args, **options):
        threads.append(threading.get_ident())
        return blake2b(*args, **options)

    monkeypatch.setattr("sluice.ring.adapters.blake2b", hashing)
    events = await client.events(text_spec(lora_weights=weights(A)))
    assert events[0].started.model_fingerprint == f"fingerprint.{AdapterFiles(A.config, A.weights).version}"
    # The first hash is the router's; the fake engine, which runs on this event loop, hashes what it receives.
    assert threads[0] != threading.get_ident()
    assert threads[-1] == threading.get_ident()


async def test_a_refused_upload_leaves_nothing_behind(ring, serving):
    client = await serving(engines=2)
    libraries(ring)[1].bad = {A.version}

    def parts():
        yield admin.UploadLoraRequest(header=admin.UploadLoraHeader(lora_id="x", config_json=A.config))
        yield admin.UploadLoraRequest(data=A.weights)

    for call, field in ((client.models.UploadLora(parts()), "data"), (load(client, "x", files=A), "weights")):
        details = await refused(call)
        assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, [field])
        assert not (await listed(client)).loras
        assert client.router.ring.adapters.files.nbytes == 0
    assert all(engine.adapters.changes_since(0) is None for engine in ring.engines.values())
    assert not libraries(ring)[1].host
    # Files that an id refers to are kept, even if another load of them fails.
    await load(client, "y", "/b")
    await load(client, "y", files=B)
    libraries(ring)[1].bad, libraries(ring)[1].host = {B.version}, {}
    await refused(load(client, "z", files=B))
    assert client.router.ring.adapters.files.get(B.version) is not None


async def test_the_reason_why_an_uploaded_adapter_cannot_be_served_is_reported(ring, serving):
    client = await serving()
    libraries(ring)[0].bad = {A.version}
    details = await refused(client.events(text_spec(lora_weights=weights(A))))
    assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, ["spec.lora_weights"])
    assert "not a safetensors file" in details.bad.field_violations[0].description
    assert len(ring.calls) == 2
    assert client.router.ring.adapters.files.nbytes == 0


async def test_adapters_in_requests_can_be_off(serving):
    client = await serving(lora_in_requests=False)
    details = await refused(client.events(text_spec(lora_weights=weights(A))))
    assert (details.code, details.fields) == (StatusCode.PERMISSION_DENIED, ["spec.lora_weights"])


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
    """Even if this router hears of the change only after it has loaded the configured adapters."""
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
    other = await start(wait=False, listen=f"ipc://{folder}/other")
    asked = (text_spec(lora_id="x"), text_spec(model="x"))
    for events in await asyncio.gather(*map(other.events, asked)):
        assert events[0].started.model_fingerprint == f"fingerprint.{A.version}"


async def test_requests_wait_for_a_configured_adapter_which_is_loaded_once_its_engine_returns(
    ring, serving, monkeypatch
):
    monkeypatch.setattr("router.peers.learning.LEARN_SECONDS", 60.0)
    monkeypatch.setattr("router.peers.learning.RETRY_SECONDS", 0.05)
    client = await serving(lora_adapters={"x": "/a"})
    (engine,) = ring.engines.values()
    asked = asyncio.ensure_future(client.events(text_spec(lora_id="x")))

    def die(_) -> None:
        engine.restart()
        engine.serve_adapters().folders["/a"] = A

    engine.adapters.on_message = die
    await client.until(lambda: client.lines("adapter_not_loaded"))
    assert (await asked)[-1].HasField("done")


async def test_a_folder_whose_files_differ_between_engines_is_refused(ring, serving):
    client = await serving(engines=2)
    libraries(ring)[0].folders["/a"] = B
    details = await refused(load(client, "x", "/a"))
    assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, ["path"])
    assert not (await listed(client)).loras


async def test_bad_loads_name_field_and_limit(serving):
    client = await serving()
    for request, field in (
        (admin.LoadLoraRequest(lora_id="", path="/a"), "lora_id"),
        (admin.LoadLoraRequest(lora_id="tiny", path="/a"), "lora_id"),
        (admin.LoadLoraRequest(lora_id="x\n", path="/a"), "lora_id"),
        (admin.LoadLoraRequest(lora_id="x" * 257, path="/a"), "lora_id"),
        (admin.LoadLoraRequest(lora_id="x"), "path"),
        (admin.LoadLoraRequest(lora_id="x", path="/nowhere"), "path"),
        (admin.LoadLoraRequest(lora_id="x", weights=pb.LoraWeights(config_json=b"{}")), "weights.safetensors"),
    ):
        details = await refused(client.models.LoadLora(request))
        assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, [field])
    details = await refused(client.models.UploadLora(iter([admin.UploadLoraRequest(data=b"x")])))
    assert details.fields == ["part"]
    details = await refused(client.events(text_spec(lora_id="x y")))
    assert details.code is StatusCode.NOT_FOUND


async def test_concurrent_loads_are_bounded(ring, serving):
    """Otherwise an engine would have to drop some of its answers, and their callers would wait for minutes."""
    client = await serving()
    (engine,) = ring.engines.values()
    held, take = [], engine.adapters.on_message
    engine.adapters.on_message = held.append
    loads = [asyncio.ensure_future(load(client, f"x{i}", "/a")) for i in range(MAX_LOADS)]
    await client.until(lambda: len([each for each in held if isinstance(each, LoadAdapter)]) == MAX_LOADS)
    details = await refused(load(client, "one-more", "/a"))
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert f"{MAX_LOADS} loads" in details.error.details()
    engine.adapters.on_message = take
    for message in held:
        take(message)
    assert {each.version for each in await asyncio.gather(*loads)} == {A.version}
    await load(client, "one-more", "/a")


async def test_engines_without_adapters(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    details = await refused(load(client, "x", "/a"))
    assert details.code is StatusCode.UNIMPLEMENTED


async def test_the_number_of_adapters_is_bounded_and_pages_list_all(serving):
    client = await serving()
    for i in range(5):
        await load(client, f"x{i}", "/a")
    first = await listed(client, page_size=3)
    second = await listed(client, page_size=3, page_token=first.next_page_token)
    assert [each.lora_id for each in (*first.loras, *second.loras)] == [f"x{i}" for i in range(5)]
    assert not second.next_page_token
    details = await refused(listed(client, page_size=1001))
    assert details.fields == ["page_size"]
    for i in range(5, MAX_ADAPTERS):
        await load(client, f"x{i}", "/a")
    details = await refused(load(client, "one more", "/a"))
    assert details.fields == ["lora_id"]
    details = await refused(load(client, "one-more", "/a"))
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    # An existing one can be loaded again.
    assert (await load(client, "x7", "/b")).version == B.version
