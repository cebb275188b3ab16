"""Prompt adapters on a ring: several routers, restarts of routers and engines, streams that resume."""

import asyncio
from functools import partial

import numpy as np
import pytest
from grpc import StatusCode

from router.peers import learning, prompt_adapters
from sluice.v1 import generation_pb2 as pb
from sluice.wire.tables import Table
from tests.fakes.prompt_files import some_rows
from tests.router.api.prompt_adapter_calls import A, B, C, listed, load, named, table_of, unload, version_at
from tests.router.conftest import refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway

pytestmark = pytest.mark.usefixtures("quick_sync")


def agree(clients, name: str, version: str | None) -> bool:
    return all(version_at(client, name) == version for client in clients)


def tables_of(ring, request_id: str) -> tuple[Table, ...]:
    (tables,) = [call.submit.extras.tables.tables for call in ring.calls if call.submit.name == request_id]
    return tables


async def test_random_changes_at_two_routers(ring, start, folder):
    """A router uses its own changes immediately, and the other router's changes soon."""
    ring.add_engine("one")
    ring.add_engine("two")
    ring.add_detokenizer()
    routers = [await start(), await start(listen=f"ipc://{folder}/other")]
    random, expected_versions = np.random.default_rng(5), {}
    for _ in range(25):
        client = routers[random.integers(2)]
        name, rows = random.choice(["x", "y", "z"]), [A, B, C][random.integers(3)]
        if random.random() < 0.6:
            expected_versions[name] = (await load(client, name, rows)).version
        elif name in expected_versions:
            await unload(client, name)
            del expected_versions[name]
        else:
            details = await refused(unload(client, name))
            assert (details.code, details.info.reason) == (StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
        assert version_at(client, name) == expected_versions.get(name)
        # Wait until the routers agree: of two simultaneous changes, either one may win.
        await client.until(partial(agree, routers, name, expected_versions.get(name)))
        for router_client in routers:
            if name in expected_versions:
                response = await router_client.generate(named(name))
                assert tables_of(ring, response.request_id)[0].digest.hex() == expected_versions[name]
            else:
                details = await refused(router_client.generate(named(name)))
                assert (details.code, details.fields) == (StatusCode.NOT_FOUND, ["spec.prompt_adapter_id"])
    assert [adapter.version for adapter in await listed(routers[0])] == [
        expected_versions[name] for name in sorted(expected_versions)
    ]


async def test_a_router_that_starts_later_knows_all_adapters_from_its_first_request_on(ring, start, folder, client):
    for number in range(20):
        await load(client, f"id-{number}", some_rows(number))
    await load(client, "gone", A)
    await unload(client, "gone")
    (engine,) = ring.engines.values()
    await client.until(
        lambda: engine.prompt_adapters.changes_since(0) and len(engine.prompt_adapters.changes_since(0).entries) == 21
    )
    await client.router.stop(0.0)
    # No router is running now, so only the engine has the rows.
    new_client = await start(listen=f"ipc://{folder}/other")
    await asyncio.gather(*(new_client.generate(named(f"id-{number}")) for number in range(20)))
    digests = {call.submit.extras.tables.tables[0].digest for call in ring.calls}
    assert digests == {table_of(some_rows(number)).digest for number in range(20)}
    assert (await refused(new_client.generate(named("gone")))).code is StatusCode.NOT_FOUND


async def test_rows_are_read_from_another_engine_if_one_dies(ring, start, folder, client, monkeypatch):
    """Even if the router has just started, and the engine that reported them dies before sending them."""
    await load(client, "x", A)
    (engine,) = ring.engines.values()
    await client.until(lambda: engine.prompt_adapters.changes_since(0) is not None)
    on_message, engine.prompt_adapters.on_message = engine.prompt_adapters.on_message, lambda _: None
    monkeypatch.setattr(learning, "LEARN_SECONDS", 60.0)
    new_client = await start(listen=f"ipc://{folder}/other")
    await new_client.until(lambda: not new_client.router.ring.prompt_adapters.is_unknown("x"))
    waiting = asyncio.ensure_future(new_client.events(named("x")))
    engine.prompt_adapters.on_message = on_message
    engine.restart()
    assert (await waiting)[-1].HasField("done")


async def test_a_stream_keeps_its_rows(ring, client):
    """Despite an unload, a reload, and the death of its engine."""
    await load(client, "x", A)
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(named("x", "x = 1", output=IDS)))
    await asyncio.wait_for(script.reached.wait(), 60)
    await unload(client, "x")
    await load(client, "x", B)
    (engine,) = ring.engines.values()
    engine.restart()
    events = await task
    first, second = (call.submit for call in script.attempts)
    assert first.extras.tables == second.extras.tables
    assert first.extras.tables.tables == (table_of(A),)
    check_whole(events, second, 1)
    assert events[0].started.model_fingerprint == f"fingerprint+{table_of(A).digest.hex()}"


async def test_a_stream_resumes_with_the_rows_it_began_with(ring, start, folder, client, monkeypatch):
    other_client = await start(listen=f"ipc://{folder}/other")
    await load(client, "x", A)
    started = (await client.events(named("x")))[0].started
    await other_client.until(lambda: version_at(other_client, "x") == table_of(A).digest.hex())
    await load(client, "x", B)
    await other_client.until(lambda: version_at(other_client, "x") == table_of(B).digest.hex())
    part = pb.ResumeFrom(token_ids=[7], model_fingerprint=started.model_fingerprint)
    resumed = named("x", resume=[part], sampling={"seed": started.seed})
    await other_client.events(resumed)
    assert ring.calls[-1].submit.extras.tables.tables == (table_of(A),)
    assert ring.calls[-1].submit.resume == {0: [7]}
    details = await refused(other_client.events(text_spec(resume=[part], sampling={"seed": started.seed})))
    assert (details.code, details.info.reason) == (StatusCode.FAILED_PRECONDITION, "MODEL_CHANGED")
    plain = pb.ResumeFrom(token_ids=[7], model_fingerprint="fingerprint")
    details = await refused(other_client.events(named("x", resume=[plain], sampling={"seed": started.seed})))
    assert details.info.reason == "MODEL_CHANGED"
    # After a while they are no longer kept.
    other_client.router.ring.prompt_adapters._store._kept_seconds = 0.0
    await other_client.until(
        lambda: other_client.router.ring.prompt_adapters.find("x", table_of(A).digest.hex()) is None
    )
    details = await refused(other_client.events(resumed))
    assert (details.code, details.info.reason) == (StatusCode.FAILED_PRECONDITION, "ADAPTER_MISSING")


async def test_rows_that_do_not_arrive_are_reported_as_missing(ring, start, folder, client, monkeypatch):
    monkeypatch.setattr(prompt_adapters, "SETTLE_SECONDS", 0.2)
    await load(client, "x", A)
    (engine,) = ring.engines.values()
    await client.until(lambda: engine.prompt_adapters.changes_since(0) is not None)
    engine.prompt_adapters.on_message = lambda _: None
    new_client = await start(listen=f"ipc://{folder}/other")
    await new_client.until(lambda: not new_client.router.ring.prompt_adapters.is_unknown("x"))
    details = await refused(new_client.generate(named("x")))
    assert details.info.reason == "ADAPTER_MISSING"
    # A new process at that address gets the rows from the router that has them.
    engine.restart()
    await new_client.until(lambda: version_at(new_client, "x") is not None)
    await new_client.generate(named("x"))


async def test_rows_are_loaded_once_an_engine_is_known(ring, start, folder):
    client = await start(wait=False, engines=(f"ipc://{folder}/engine",), detokenizers=(f"ipc://{folder}/detok",))
    details = await refused(load(client, "x", A))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
