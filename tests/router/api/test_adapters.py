"""LoRA adapters over real gRPC and ZeroMQ: loading, uploading, using and listing them, and refused calls."""

import asyncio
import threading
from hashlib import blake2b

import pytest
from grpc import StatusCode

from router.api.model_service import MAX_LOADS, MAX_UPLOADS
from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from sluice.wire.adapters import PART_BYTES, Adapter, AdapterFiles, LoadAdapter
from tests.fakes.library import files
from tests.fakes.submits import extras_of
from tests.router.api.adapter_calls import A, B, libraries, listed, load, weights
from tests.router.conftest import refused, text_spec

pytestmark = pytest.mark.usefixtures("quick_recovery")


async def test_a_folder_is_loaded_on_every_engine_and_used_by_its_id(ring, serving):
    client = await serving(engines=2)
    lora = await load(client, "sql", "/a")
    assert (lora.lora_id, lora.path, lora.rank, lora.version) == ("sql", "/a", 8, A.version)
    assert all(A.version in library.host for library in libraries(ring))
    for fields in ({"lora_id": "sql"}, {"model": "sql"}):
        events = await client.events(text_spec(**fields))
        assert events[0].started.model_fingerprint == f"fingerprint.{A.version}"
    await client.events(text_spec())
    submitted = [extras_of(call.submit).adapter for call in ring.calls]
    assert sorted(map(str, submitted)) == sorted(map(str, [None, *2 * [Adapter("sql", A.version, "/a")]]))
    assert list((await listed(client)).loras) == [lora]


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

    monkeypatch.setattr("sluice.wire.adapters.blake2b", hashing)
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

    for call, expected_field in ((client.models.UploadLora(parts()), "data"), (load(client, "x", files=A), "weights")):
        details = await refused(call)
        assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, [expected_field])
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
    """Without the limit, an engine would have to drop some answers, and their callers would wait for minutes."""
    client = await serving()
    (engine,) = ring.engines.values()
    messages, handle = [], engine.adapters.on_message
    engine.adapters.on_message = messages.append
    loads = [asyncio.ensure_future(load(client, f"x{i}", "/a")) for i in range(MAX_LOADS)]
    await client.until(
        lambda: len([load_message for load_message in messages if isinstance(load_message, LoadAdapter)]) == MAX_LOADS
    )
    details = await refused(load(client, "one-more", "/a"))
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert f"{MAX_LOADS} loads" in details.error.details()
    engine.adapters.on_message = handle
    for message in messages:
        handle(message)
    assert {lora.version for lora in await asyncio.gather(*loads)} == {A.version}
    await load(client, "one-more", "/a")


async def test_engines_without_adapters(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    details = await refused(load(client, "x", "/a"))
    assert details.code is StatusCode.UNIMPLEMENTED
