"""AdminService.SetServingVersion: which engines get requests, which streams are not moved, and where it is shown."""

import asyncio

import pytest
from grpc import StatusCode

from sluice.v1 import admin_pb2
from tests.fakes.ring_scripts import generate
from tests.router.conftest import refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway
from tests.router.test_metrics import scrape

pytestmark = pytest.mark.usefixtures("quick_recovery")

MODELS = {"v1": "0123456789abcdef", "v2": "fedcba9876543210"}


@pytest.fixture
def labelled(ring, start):
    """Starts a router with one engine for each of these versions."""

    async def labelled(*versions: str, **settings):
        for number, version in enumerate(versions):
            engine = ring.add_engine(f"engine-{number}")
            engine.model_version, engine.fingerprint = version, MODELS[version]
        ring.add_detokenizer()
        return await start(**{"peer_timeout": 0.6, **settings})

    return labelled


def set_version(client, version=""):
    return client.admin.SetServingVersion(admin_pb2.SetServingVersionRequest(version=version))


def answer(former, version, engines):
    return admin_pb2.SetServingVersionResponse(former_version=former, version=version, serving_engines=engines)


async def info(client):
    return await client.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())


async def model_of(client) -> str:
    """The model of a new request."""
    return (await client.events(text_spec()))[0].started.model_fingerprint


async def test_new_requests_go_to_the_set_version_and_back(labelled):
    client = await labelled("v1", "v1", "v2", serving_version="v1")
    assert await model_of(client) == MODELS["v1"]
    assert await set_version(client, "v2") == answer("v1", "v2", 1)
    assert {await model_of(client) for _ in range(6)} == {MODELS["v2"]}
    assert await set_version(client, "v2") == answer("v2", "v2", 1)
    assert await set_version(client, "v1") == answer("v2", "v1", 2)
    assert {await model_of(client) for _ in range(6)} == {MODELS["v1"]}
    assert await set_version(client) == answer("v1", "", 3)
    logged = [(line["former"], line["version"]) for line in client.lines("serving_version_set")]
    assert logged == [("v1", "v2"), ("v2", "v1"), ("v1", "")]


async def test_the_version_is_shown(labelled):
    client = await labelled("v1", "v2", "v2")
    server_info = await info(client)
    assert (server_info.serving_version, server_info.serving_engines) == ("", 3)
    assert scrape(client.router)("serving_engines", version="") == 3
    await set_version(client, "v1")
    server_info = await info(client)
    assert (server_info.serving_version, server_info.serving_engines) == ("v1", 1)
    assert scrape(client.router)("serving_engines", version="v1") == 1
    stats = (await client.admin.GetStats(admin_pb2.GetStatsRequest())).stats
    assert [engine.model_version for engine in stats.engines] == ["v1", "v2", "v2"]
    assert stats.serving_model_fingerprint == MODELS["v1"]


async def test_a_version_that_no_engine_has_is_refused(labelled):
    client = await labelled("v1", "v2")
    await set_version(client, "v2")
    details = await refused(set_version(client, "v3"))
    assert (details.code, details.info.reason) == (StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert details.error.details() == "version is 'v3', must be one of 'v1', 'v2'"
    assert dict(details.info.metadata) == {"version": "'v3'", "known": "'v1', 'v2'"}
    assert (await info(client)).serving_version == "v2"


async def test_a_version_whose_engines_drain_is_refused(labelled, ring):
    client = await labelled("v1", "v2")
    ring.engines[next(iter(ring.engines))].draining = True
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 1)
    details = await refused(set_version(client, "v1"))
    assert details.error.details().endswith("must be one of 'v2'")


async def test_other_engines_serve_once_those_of_the_version_are_lost(labelled, ring):
    client = await labelled("v1", "v2")
    await set_version(client, "v2")
    for engine in ring.engines.values():
        engine.beating = engine.model_version != "v2"
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 1)
    assert await model_of(client) == MODELS["v1"]
    server_info = await info(client)
    assert (server_info.serving_version, server_info.serving_engines) == ("v2", 0)
    assert len(client.lines("serving_version_missing")) == 1


async def test_a_stream_keeps_the_model_with_which_it_began(labelled, ring):
    """Even if its engine dies after the change: it moves to another engine of the old version."""
    client = await labelled("v1", "v1", "v2", serving_version="v1")
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(output=IDS)))
    await asyncio.wait_for(script.reached.wait(), 60)
    await set_version(client, "v2")
    first = script.attempts[0]
    first.engine.beating = False
    events = await asyncio.wait_for(task, 60)
    check_whole(events, first.submit, 1)
    assert [call.engine.model_version for call in script.attempts] == ["v1", "v1"]
    ring.script = generate
    assert await model_of(client) == MODELS["v2"]


async def test_routers_are_changed_one_by_one(labelled, start):
    first = await labelled("v1", "v2", serving_version="v1")
    second = await start(serving_version="v1", listen=f"{first.router.settings.listen}-2")
    await set_version(first, "v2")
    assert [(await info(client)).serving_version for client in (first, second)] == ["v2", "v1"]
    assert (await model_of(first), await model_of(second)) == (MODELS["v2"], MODELS["v1"])
