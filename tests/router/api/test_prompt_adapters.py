"""Prompt adapters over real gRPC and ZeroMQ: loading, using, replacing; several routers and engine deaths."""

import asyncio
import time
from functools import partial

import numpy as np
import pytest
from grpc import StatusCode

from router.peers import learning, prompt_adapters
from sluice.ring import prompt_adapters as ring_side
from sluice.ring.adapters import AdapterEntry
from sluice.ring.prompt_adapters import StorePromptAdapter
from sluice.ring.tables import Table
from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from tests.fakes.pickles import Trap
from tests.fakes.prompt_files import BAD_FILES, config_of, some_rows, weights_of, write
from tests.fakes.ring_scripts import hang
from tests.router.conftest import refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway

VOCABULARY = 4096
A, B, C = (some_rows(seed) for seed in range(3))


@pytest.fixture(autouse=True)
def quickly(monkeypatch, quick_recovery):
    monkeypatch.setattr(prompt_adapters, "SYNC_SECONDS", 0.05)
    monkeypatch.setattr(prompt_adapters, "RETRY_SECONDS", 0.3)


@pytest.fixture
async def client(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    return await start()


def message_of(rows: np.ndarray) -> pb.Embeddings:
    return pb.Embeddings(shape=rows.shape, dtype="float32", data=rows.tobytes())


def table_of(rows: np.ndarray) -> Table:
    return Table.of(*rows.shape, "float32", rows.tobytes())


async def load(client, name: str, table: np.ndarray | None = None, **source) -> admin.PromptAdapter:
    source = source if table is None else {"rows": message_of(table)}
    request = admin.LoadPromptAdapterRequest(prompt_adapter_id=name, **source)
    return (await client.models.LoadPromptAdapter(request)).prompt_adapter


async def unload(client, name: str) -> None:
    await client.models.UnloadPromptAdapter(admin.UnloadPromptAdapterRequest(prompt_adapter_id=name))


async def listed(client, **page) -> list[admin.PromptAdapter]:
    return list((await client.models.ListPromptAdapters(admin.ListPromptAdaptersRequest(**page))).prompt_adapters)


def named(name: str, text: str = "t", **fields) -> pb.GenerationSpec:
    return text_spec(text, prompt_adapter_id=name, **fields)


def version_at(client, name: str) -> str | None:
    table = client.router.ring.prompt_adapters.find(name)
    return None if table is None else table.digest.hex()


def agree(clients, name: str, version: str | None) -> bool:
    return all(version_at(each, name) == version for each in clients)


def tables_of(ring, request_id: str) -> tuple[Table, ...]:
    (found,) = [call.submit.tables.tables for call in ring.calls if call.submit.name == request_id]
    return found


async def test_each_source_and_each_form_of_prompt(ring, start, tmp_path):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(prompt_adapter_folders=(str(tmp_path),))
    files = admin.PromptAdapterFiles(config_json=config_of(A), safetensors=weights_of(A))
    path = str(write(tmp_path / "a", A))
    found = [await load(client, "1", A), await load(client, "2", files=files), await load(client, "3", path=path)]
    assert {each.version for each in found} == {table_of(A).digest.hex()}
    assert [(each.prompt_adapter_id, each.path, each.rows) for each in found] == [
        ("1", "", 3),
        ("2", "", 3),
        ("3", path, 3),
    ]
    assert await listed(client) == found
    plain = await client.generate(text_spec("x = 1"))
    for name in "123":
        response = await client.generate(named(name, "x = 1"))
        assert response.usage.prompt_tokens == plain.usage.prompt_tokens + 3
    tokens = pb.TokenIds(ids=[5, VOCABULARY + 2, 6])
    await client.generate(pb.GenerationSpec(token_ids=tokens, prompt_adapter_id="1"))
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    await client.generate(pb.GenerationSpec(chat=chat, prompt_adapter_id="1"))
    submits = [call.submit for call in ring.calls[1:]]
    assert all(submit.tables.tables == (table_of(A),) and submit.tables.tables[0].intact for submit in submits)
    first = list(range(VOCABULARY, VOCABULARY + 3))
    assert [submit.prompt[:3] for submit in submits] == [first, first, first, [5, VOCABULARY + 2, 6], first]


async def test_random_changes_at_two_routers(ring, start, folder):
    """A router uses its own changes immediately, and the other router's changes soon."""
    ring.add_engine("one")
    ring.add_engine("two")
    ring.add_detokenizer()
    routers = [await start(), await start(listen=f"ipc://{folder}/other")]
    random, right = np.random.default_rng(5), {}
    for _ in range(25):
        client = routers[random.integers(2)]
        name, rows = random.choice(["x", "y", "z"]), [A, B, C][random.integers(3)]
        if random.random() < 0.6:
            right[name] = (await load(client, name, rows)).version
        elif name in right:
            await unload(client, name)
            del right[name]
        else:
            details = await refused(unload(client, name))
            assert (details.code, details.info.reason) == (StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
        assert version_at(client, name) == right.get(name)
        # Wait until the routers agree: of two simultaneous changes, either one may win.
        await client.until(partial(agree, routers, name, right.get(name)))
        for each in routers:
            if name in right:
                response = await each.generate(named(name))
                assert tables_of(ring, response.request_id)[0].digest.hex() == right[name]
            else:
                details = await refused(each.generate(named(name)))
                assert (details.code, details.fields) == (StatusCode.NOT_FOUND, ["spec.prompt_adapter_id"])
    assert [each.version for each in await listed(routers[0])] == [right[name] for name in sorted(right)]


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
    other = await start(listen=f"ipc://{folder}/other")
    await asyncio.gather(*(other.generate(named(f"id-{number}")) for number in range(20)))
    asked = {call.submit.tables.tables[0].digest for call in ring.calls}
    assert asked == {table_of(some_rows(number)).digest for number in range(20)}
    assert (await refused(other.generate(named("gone")))).code is StatusCode.NOT_FOUND


async def test_a_request_that_arrives_before_any_heartbeat(ring, start, folder, client, monkeypatch):
    await load(client, "x", A)
    (engine,) = ring.engines.values()
    await client.until(lambda: engine.prompt_adapters.changes_since(0) is not None)
    began = (await client.events(named("x")))[0].started
    await client.router.stop(0.0)
    monkeypatch.setattr(learning, "LEARN_SECONDS", 60.0)
    other = await start(wait=False, listen=f"ipc://{folder}/other")
    part = pb.ResumeFrom(token_ids=[7], model_fingerprint=began.model_fingerprint)
    resumed = named("x", resume=[part], sampling={"seed": began.seed})
    first, second = await asyncio.gather(other.events(named("x")), other.events(resumed))
    assert first[-1].HasField("done")
    assert second[-1].HasField("done")
    assert {call.submit.tables.tables for call in ring.calls} == {(table_of(A),)}


async def test_rows_are_read_from_another_engine_if_one_dies(ring, start, folder, client, monkeypatch):
    """Even if the router has just started, and the engine that reported them dies before sending them."""
    await load(client, "x", A)
    (engine,) = ring.engines.values()
    await client.until(lambda: engine.prompt_adapters.changes_since(0) is not None)
    keep, engine.prompt_adapters.on_message = engine.prompt_adapters.on_message, lambda _: None
    monkeypatch.setattr(learning, "LEARN_SECONDS", 60.0)
    other = await start(listen=f"ipc://{folder}/other")
    await other.until(lambda: not other.router.ring.prompt_adapters.is_unknown("x"))
    asked = asyncio.ensure_future(other.events(named("x")))
    engine.prompt_adapters.on_message = keep
    engine.restart()
    assert (await asked)[-1].HasField("done")


async def test_an_engine_that_starts_later_gets_all_adapters(ring, client):
    for number in range(3):
        await load(client, f"id-{number}", some_rows(number))
    (engine,) = ring.engines.values()
    engine.restart()
    await client.until(
        lambda: engine.prompt_adapters.changes_since(0) and len(engine.prompt_adapters.changes_since(0).entries) == 3
    )


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
    assert first.tables == second.tables
    assert first.tables.tables == (table_of(A),)
    check_whole(events, second, 1)
    assert events[0].started.model_fingerprint == f"fingerprint+{table_of(A).digest.hex()}"


async def test_a_stream_resumes_with_the_rows_it_began_with(ring, start, folder, client, monkeypatch):
    other = await start(listen=f"ipc://{folder}/other")
    await load(client, "x", A)
    began = (await client.events(named("x")))[0].started
    await other.until(lambda: version_at(other, "x") == table_of(A).digest.hex())
    await load(client, "x", B)
    await other.until(lambda: version_at(other, "x") == table_of(B).digest.hex())
    part = pb.ResumeFrom(token_ids=[7], model_fingerprint=began.model_fingerprint)
    resumed = named("x", resume=[part], sampling={"seed": began.seed})
    await other.events(resumed)
    assert ring.calls[-1].submit.tables.tables == (table_of(A),)
    assert ring.calls[-1].submit.resume == {0: [7]}
    details = await refused(other.events(text_spec(resume=[part], sampling={"seed": began.seed})))
    assert (details.code, details.info.reason) == (StatusCode.FAILED_PRECONDITION, "MODEL_CHANGED")
    plain = pb.ResumeFrom(token_ids=[7], model_fingerprint="fingerprint")
    details = await refused(other.events(named("x", resume=[plain], sampling={"seed": began.seed})))
    assert details.info.reason == "MODEL_CHANGED"
    # After a while they are no longer kept.
    other.router.ring.prompt_adapters._store._kept_seconds = 0.0
    await other.until(lambda: other.router.ring.prompt_adapters.find("x", table_of(A).digest.hex()) is None)
    details = await refused(other.events(resumed))
    assert (details.code, details.info.reason) == (StatusCode.FAILED_PRECONDITION, "ADAPTER_MISSING")


async def test_rows_that_do_not_arrive_are_reported_as_missing(ring, start, folder, client, monkeypatch):
    monkeypatch.setattr(prompt_adapters, "SETTLE_SECONDS", 0.2)
    await load(client, "x", A)
    (engine,) = ring.engines.values()
    await client.until(lambda: engine.prompt_adapters.changes_since(0) is not None)
    engine.prompt_adapters.on_message = lambda _: None
    other = await start(listen=f"ipc://{folder}/other")
    await other.until(lambda: not other.router.ring.prompt_adapters.is_unknown("x"))
    details = await refused(other.generate(named("x")))
    assert details.info.reason == "ADAPTER_MISSING"
    # A new process at that address gets the rows from the router that has them.
    engine.restart()
    await other.until(lambda: version_at(other, "x") is not None)
    await other.generate(named("x"))


async def test_configured_adapters_are_loaded(ring, start, tmp_path, monkeypatch):
    monkeypatch.setattr("router.api.prompt_adapters.CONFIGURED_SECONDS", 0.1)
    ring.add_engine()
    ring.add_detokenizer()
    given = {"a": str(write(tmp_path / "a", A)), "none": str(tmp_path / "none")}
    client = await start(prompt_adapters=given, prompt_adapter_folders=(str(tmp_path),))
    await client.until(lambda: version_at(client, "a") is not None and client.lines("adapter_not_loaded"))
    assert [line["adapter"] for line in client.lines("adapter_not_loaded")] == ["none"]


async def test_a_change_by_a_call_takes_precedence_over_the_settings(ring, start, tmp_path, monkeypatch):
    """Even if this router hears of the change only after it has loaded the configured adapters."""
    monkeypatch.setattr("router.api.prompt_adapters.CONFIGURED_SECONDS", 0.1)
    engine = ring.add_engine()
    ring.add_detokenizer()
    given = {"x": str(write(tmp_path / "x", A))}
    client = await start(prompt_adapters=given, prompt_adapter_folders=(str(tmp_path),))
    await client.until(lambda: version_at(client, "x") is not None)
    table = table_of(B)
    changed = AdapterEntry("x", time.time() - 60.0, table.digest.hex(), size=table.rows)
    engine.prompt_adapters.on_message(StorePromptAdapter(engine.epoch, changed, table))
    await client.until(lambda: version_at(client, "x") == table.digest.hex())


async def test_their_memory_is_bounded(client, monkeypatch):
    monkeypatch.setattr(prompt_adapters, "MAX_LOADED_BYTES", 2 * A.nbytes)
    await load(client, "x", A)
    await load(client, "y", B)
    details = await refused(load(client, "z", C))
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    # There is room if it replaces its own former rows.
    await load(client, "y", C)
    monkeypatch.setattr(prompt_adapters, "MAX_ADAPTERS", 2)
    monkeypatch.setattr(prompt_adapters, "MAX_LOADED_BYTES", 1000)
    assert "2 prompt adapters are loaded" in (await refused(load(client, "z", C))).error.details()


async def test_former_rows_are_evicted_when_room_is_needed(client, monkeypatch):
    monkeypatch.setattr(ring_side, "MAX_KEPT_BYTES", 2 * A.nbytes)
    for rows in (A, B, C):
        await load(client, "x", rows)
    kept = [client.router.ring.prompt_adapters.find("x", table_of(rows).digest.hex()) for rows in (A, B, C)]
    assert kept == [None, table_of(B), table_of(C)]


async def test_running_requests_are_bounded_by_their_rows_too(ring, client, monkeypatch):
    monkeypatch.setattr("router.requests.registry.MAX_OPEN_TABLE_BYTES", A.nbytes)
    for name, rows in (("x", A), ("same", A), ("y", B)):
        await load(client, name, rows)
    ring.script = hang
    # Equal rows are stored once.
    tasks = [asyncio.ensure_future(client.events(named(name))) for name in ("x", "x", "same")]
    await client.until(lambda: len(ring.calls) == 3)
    assert (await refused(client.events(named("y")))).info.reason == "OVERLOADED"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.until(lambda: not client.router.ring.requests.open)
    task = asyncio.ensure_future(client.events(named("y")))
    await client.until(lambda: len(ring.calls) == 4)
    task.cancel()


async def test_pages(client):
    for number in range(5):
        await load(client, f"id-{number}", A)
    request, found = admin.ListPromptAdaptersRequest(page_size=2), []
    while True:
        answer = await client.models.ListPromptAdapters(request)
        assert len(answer.prompt_adapters) <= 2
        found += [each.prompt_adapter_id for each in answer.prompt_adapters]
        if not answer.next_page_token:
            break
        request.page_token = token = answer.next_page_token
        # Listed adapters may be unloaded in the meantime.
        await unload(client, found[-1])
    assert found == [f"id-{number}" for number in range(5)]
    assert len((await client.models.ListModels(admin.ListModelsRequest(page_size=1))).models) == 1
    calls = {
        client.models.ListPromptAdapters: admin.ListPromptAdaptersRequest,
        client.models.ListLoras: admin.ListLorasRequest,
        client.models.ListModels: admin.ListModelsRequest,
    }
    for call, kind in calls.items():
        invalid = ["x", "id-1", "é", "a" * 10_000, token + " ", token[:-1]]
        for bad in invalid if kind is admin.ListPromptAdaptersRequest else [*invalid, token]:
            details = await refused(call(kind(page_token=bad)))
            assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, ["page_token"])
        assert (await refused(call(kind(page_size=1001)))).fields == ["page_size"]


WIDE, NAN = some_rows(0, hidden_size=3), np.where(np.arange(6).reshape(3, 2) == 4, np.nan, A).astype(np.float32)
HOSTILE = {
    "no id": ("", {"rows": message_of(A)}, "prompt_adapter_id"),
    "an id with a blank": ("a b", {"rows": message_of(A)}, "prompt_adapter_id"),
    "no source": ("x", {}, "path"),
    "no folders": ("x", {"path": "/etc"}, "path"),
    "another hidden size": ("x", {"rows": message_of(WIDE)}, "rows.shape"),
    "not a number": ("x", {"rows": message_of(NAN)}, "rows.data"),
    "too few bytes": ("x", {"rows": pb.Embeddings(shape=[3, 2], dtype="float32", data=bytes(20))}, "rows.data"),
    "too many bytes": ("x", {"rows": pb.Embeddings(shape=[4, 2], dtype="float32", data=bytes(9 << 20))}, "rows.data"),
    "another type": ("x", {"rows": pb.Embeddings(shape=[3, 2], dtype="int8", data=bytes(6))}, "rows.dtype"),
}


@pytest.mark.parametrize(("name", "source", "field"), HOSTILE.values(), ids=HOSTILE)
async def test_bad_calls(client, name, source, field):
    details = await refused(load(client, name, **source))
    assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, [field])
    assert not await listed(client)


async def test_bad_files_leave_nothing_behind(ring, client, tmp_path):
    trap = Trap(tmp_path)
    pickles = [(config_of(A), data) for data in (trap.pickled, trap.saved, trap.zipped)]
    for config, weights, *_ in (*BAD_FILES.values(), *pickles, (trap.pickled, weights_of(A))):
        files = admin.PromptAdapterFiles(config_json=config, safetensors=weights)
        assert (await refused(load(client, "x", files=files))).code is StatusCode.INVALID_ARGUMENT
    assert not await listed(client)
    assert version_at(client, "x") is None
    (engine,) = ring.engines.values()
    assert engine.prompt_adapters.changes_since(0) is None
    assert not trap.sprung


async def test_paths(ring, start, tmp_path):
    ring.add_engine()
    ring.add_detokenizer()
    allowed = tmp_path / "allowed"
    outside = write(tmp_path / "outside", A)
    inside = write(allowed / "inside", A)
    (allowed / "link").symlink_to(outside)
    (allowed / "linked").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (allowed / "linked" / name).symlink_to(outside / name)
    trap = Trap(tmp_path)
    for name, data in trap.files.items():
        (allowed / name).mkdir()
        (allowed / name / "adapter_config.json").write_bytes(config_of(A))
        (allowed / name / name).write_bytes(data)
    client = await start(prompt_adapter_folders=(str(allowed),))
    expected = {
        outside: "is not within one of prompt_adapter_folders",
        allowed / ".." / "outside": "is not within one of",
        allowed / "link": "is not within one of",
        allowed / "linked": "adapter_config.json is not a file",
        **dict.fromkeys(map(allowed.joinpath, trap.files), "cannot be read: No such file"),
        allowed / "adapter_model.bin": "is a pickle",
        allowed / "none": "cannot be read: No such file",
        "\0": "is not a folder",
    }
    for path, reason in expected.items():
        details = await refused(load(client, "x", path=str(path)))
        assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, ["path"])
        assert reason in details.error.details(), path
    assert not await listed(client)
    # Pickles alongside the rows are not read.
    trap.write(inside)
    await load(client, "x", path=str(inside))
    assert not trap.sprung


async def test_fields_that_cannot_be_combined(client):
    await load(client, "x", A)
    table = pb.PromptTable(embeddings=message_of(A))
    specs = {
        "spec.prompt_adapter_id": pb.GenerationSpec(prompt_embeds=message_of(A), prompt_adapter_id="x"),
        "spec.prompt_adapter_id ": named("x", prompt_table=table),
        "spec.output.prompt_logprobs": named("x", output=pb.OutputOptions(prompt_logprobs=1)),
        "spec.truncate_prompt_tokens": named("x", truncate_prompt_tokens=1),
        "spec.token_ids.ids[0]": pb.GenerationSpec(token_ids=pb.TokenIds(ids=[VOCABULARY + 3]), prompt_adapter_id="x"),
        "spec.token_ids.ids": pb.GenerationSpec(token_ids=pb.TokenIds(ids=[5]), prompt_adapter_id="x"),
        "spec.prompt_adapter_id  ": named("a b"),
    }
    for field, spec in specs.items():
        assert field.strip() in (await refused(client.generate(spec))).fields


async def test_rows_are_loaded_once_an_engine_is_known(ring, start, folder):
    client = await start(wait=False, engines=(f"ipc://{folder}/nobody",), detokenizers=(f"ipc://{folder}/none",))
    details = await refused(load(client, "x", A))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
