"""Prompt adapters over real gRPC and ZeroMQ: loading, using, listing, and refused calls."""

import asyncio

import numpy as np
import pytest
from grpc import StatusCode

from router.peers import prompt_adapters
from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from sluice.wire import adapter_registry
from tests.fakes.pickles import Trap
from tests.fakes.prompt_files import BAD_FILES, config_of, some_rows, weights_of, write
from tests.fakes.ring_scripts import hang
from tests.router.api.prompt_adapter_calls import (
    VOCABULARY,
    A,
    B,
    C,
    listed,
    load,
    message_of,
    named,
    table_of,
    version_at,
)
from tests.router.conftest import refused, text_spec

pytestmark = pytest.mark.usefixtures("quick_sync")


async def test_each_source_and_each_form_of_prompt(ring, start, tmp_path):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(prompt_adapter_folders=(str(tmp_path),))
    files = admin.PromptAdapterFiles(config_json=config_of(A), safetensors=weights_of(A))
    path = str(write(tmp_path / "a", A))
    loaded = [await load(client, "1", A), await load(client, "2", files=files), await load(client, "3", path=path)]
    assert {adapter.version for adapter in loaded} == {table_of(A).digest.hex()}
    assert [(adapter.prompt_adapter_id, adapter.path, adapter.rows) for adapter in loaded] == [
        ("1", "", 3),
        ("2", "", 3),
        ("3", path, 3),
    ]
    assert await listed(client) == loaded
    plain = await client.generate(text_spec("x = 1"))
    for name in "123":
        response = await client.generate(named(name, "x = 1"))
        assert response.usage.prompt_tokens == plain.usage.prompt_tokens + 3
    tokens = pb.TokenIds(ids=[5, VOCABULARY + 2, 6])
    await client.generate(pb.GenerationSpec(token_ids=tokens, prompt_adapter_id="1"))
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    await client.generate(pb.GenerationSpec(chat=chat, prompt_adapter_id="1"))
    submits = [call.submit for call in ring.calls[1:]]
    assert all(
        submit.extras.tables.tables == (table_of(A),) and submit.extras.tables.tables[0].intact for submit in submits
    )
    first = list(range(VOCABULARY, VOCABULARY + 3))
    assert [submit.prompt[:3] for submit in submits] == [first, first, first, [5, VOCABULARY + 2, 6], first]


async def test_their_memory_is_bounded(client, monkeypatch):
    monkeypatch.setattr(prompt_adapters, "MAX_LOADED_BYTES", 2 * A.nbytes)
    await load(client, "x", A)
    await load(client, "y", B)
    details = await refused(load(client, "z", C))
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    # The limit does not count the rows that a load replaces.
    await load(client, "y", C)


async def test_former_rows_are_evicted_when_room_is_needed(client, monkeypatch):
    monkeypatch.setattr(adapter_registry, "MAX_KEPT_BYTES", 2 * A.nbytes)
    for rows in (A, B, C):
        await load(client, "x", rows)
    tables = [client.router.ring.prompt_adapters.find("x", table_of(rows).digest.hex()) for rows in (A, B, C)]
    assert tables == [None, table_of(B), table_of(C)]


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
