"""What LoRA adapters and prompt adapters have in common: ids, pages, limits, configured adapters, and how routers and
engines agree."""

import asyncio
import time

import pytest
from grpc import StatusCode

from router.peers import adapter_catalog
from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from sluice.wire.adapters import AdapterEntry
from tests.router.api import adapter_kinds
from tests.router.api.adapter_calls import B
from tests.router.conftest import refused, text_spec

pytestmark = pytest.mark.usefixtures("quick_sync")


@pytest.fixture(params=["lora", "prompt adapter"])
def kind(request, tmp_path):
    return adapter_kinds.loras() if request.param == "lora" else adapter_kinds.prompt_adapters(tmp_path)


async def test_an_id_can_be_loaded_again_and_unloaded_once(kind, serving):
    client = await serving()
    for content in ("a", "b"):
        loaded = await kind.load(client, "x", content)
        assert (loaded.version, loaded.path) == (kind.versions[content], kind.paths[content])
        assert kind.version_at(client, "x") == kind.versions[content]
        assert kind.versions[content] in (await client.events(kind.spec("x")))[0].started.model_fingerprint
    assert await kind.listed(client) == (["x"], "")
    await kind.unload(client, "x")
    for call, field in (
        (client.events(kind.spec("x")), f"spec.{kind.id_field}"),
        (kind.unload(client, "x"), kind.id_field),
    ):
        details = await refused(call)
        assert (details.code, details.info.reason) == (StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
        assert details.fields == [field]


async def test_pages(kind, serving):
    client = await serving()
    for number in range(5):
        await kind.load(client, f"id-{number}")
    listed_ids, token = await kind.listed(client, page_size=2)
    while token:
        # Listed adapters may be unloaded in the meantime.
        await kind.unload(client, listed_ids[-1])
        page, next_token = await kind.listed(client, page_size=2, page_token=token)
        assert 0 < len(page) <= 2
        listed_ids += page
        token, last_token = next_token, token
    assert listed_ids == [f"id-{number}" for number in range(5)]
    assert len((await client.models.ListModels(admin.ListModelsRequest(page_size=1))).models) == 1
    calls = {
        client.models.ListPromptAdapters: admin.ListPromptAdaptersRequest,
        client.models.ListLoras: admin.ListLorasRequest,
        client.models.ListModels: admin.ListModelsRequest,
    }
    for call, request in calls.items():
        invalid = ["x", "id-1", "é", "a" * 10_000, last_token + " ", last_token[:-1]]
        for bad in invalid if request.__name__ == f"List{kind.title}sRequest" else [*invalid, last_token]:
            details = await refused(call(request(page_token=bad)))
            assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, ["page_token"])
        assert (await refused(call(request(page_size=1001)))).fields == ["page_size"]


async def test_the_number_of_adapters_is_bounded(kind, serving, monkeypatch):
    client = await serving()
    monkeypatch.setattr(adapter_catalog, "MAX_ADAPTERS", 2)
    for adapter_id in ("x", "y"):
        await kind.load(client, adapter_id)
    details = await refused(kind.load(client, "one more"))
    assert details.fields == [kind.id_field]
    details = await refused(kind.load(client, "one-more"))
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert f"2 {kind.text}s are loaded" in details.error.details()
    # An adapter that is already loaded can be replaced.
    assert (await kind.load(client, "y", "b")).version == kind.versions["b"]


async def test_configured_adapters_are_loaded_from_the_start(kind, serving):
    client = await serving(**{kind.configured: {"sql": kind.paths["a"], "bad": "/nowhere"}})
    await client.until(lambda: kind.version_at(client, "sql") and client.lines("adapter_not_loaded"))
    assert [line["adapter"] for line in client.lines("adapter_not_loaded")] == ["bad"]


@pytest.mark.parametrize("removed", [False, True])
async def test_a_change_by_a_call_takes_precedence_over_the_settings(kind, ring, serving, removed):
    """Even if this router learns of the change only after it has loaded the configured adapters."""
    client = await serving(**{kind.configured: {"x": kind.paths["a"]}})
    await client.until(lambda: kind.version_at(client, "x") is not None)
    (engine,) = ring.engines.values()
    # The size is the number of rows of the prompt adapter.
    kind.tell(engine, AdapterEntry("x", time.time() - 60.0, kind.versions["b"], kind.paths["b"], 3, removed))
    await client.until(lambda: kind.version_at(client, "x") == (None if removed else kind.versions["b"]))


async def test_every_router_and_a_new_engine_know_what_is_loaded(kind, ring, serving, start, folder):
    client = await serving()
    other_client = await start(listen=f"ipc://{folder}/other")
    await kind.load(client, "x")
    await kind.load(client, "y", "b")
    await other_client.until(lambda: kind.version_at(other_client, "y") is not None)
    await kind.unload(other_client, "x")
    await client.until(lambda: kind.version_at(client, "x") is None)
    # A new process at the engine's address knows no adapters until a router sends them.
    (engine,) = ring.engines.values()
    engine.restart()
    engine.serve_adapters().folders["/b"] = B
    await client.until(lambda: sorted(kind.stored(engine)) == ["x", "y"])
    assert (await client.events(kind.spec("y")))[-1].HasField("done")


async def test_a_request_that_arrives_before_any_heartbeat(kind, ring, serving, start, folder, monkeypatch):
    client = await serving()
    await kind.load(client, "x")
    (engine,) = ring.engines.values()
    await client.until(lambda: kind.stored(engine))
    begun = (await client.events(kind.spec("x")))[0].started
    await client.router.stop(0.0)
    monkeypatch.setattr("router.peers.learning.LEARN_SECONDS", 60.0)
    other_client = await start(wait=False, listen=f"ipc://{folder}/other")
    part = pb.ResumeFrom(token_ids=[7], model_fingerprint=begun.model_fingerprint)
    specs = [kind.spec("x"), kind.spec("x", resume=[part], sampling={"seed": begun.seed})]
    specs += [text_spec(model="x")] if kind.name == "lora" else []
    for events in await asyncio.gather(*map(other_client.events, specs)):
        assert kind.versions["a"] in events[0].started.model_fingerprint
        assert events[-1].HasField("done")
