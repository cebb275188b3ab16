"""Prompt tables in the router: placement by features and by cached rows, and resubmission after a loss."""

import asyncio
from struct import pack

import pytest

from router.shares import SharedSpace
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.wire.hashing import block_chain, root_hash, short_hash
from sluice.wire.tables import PromptTables, Table, VirtualTokens
from tests.fakes.ring_scripts import hang
from tests.router.conftest import Details, refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway

VOCABULARY = 4096
DATA = pack("<4e", 1.0, 2.0, -3.0, 0.5)
ROWS = pb.Embeddings(shape=[2, 2], dtype="float16", data=DATA)
TABLE = pb.PromptTable(embeddings=ROWS)
WIRE = PromptTables((Table.of(2, 2, "float16", DATA),))


@pytest.fixture
async def client(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    return await start()


async def test_the_next_attempt_has_the_same_rows(client, ring):
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec("x = 1", prompt_table=TABLE, output=IDS)))
    await asyncio.wait_for(script.reached.wait(), 60)
    (engine,) = ring.engines.values()
    engine.epoch += 1
    events = await task
    first, second = (call.submit for call in script.attempts)
    assert first.prompt[:2] == [VOCABULARY, VOCABULARY + 1]
    assert (first.prompt, first.extras.tables) == (second.prompt, second.extras.tables)
    assert first.extras.tables == WIRE
    assert all(table.intact for table in first.extras.tables.tables)
    check_whole(events, second, 1)


async def test_each_kind_of_prompt(client, ring):
    ids = pb.TokenIds(ids=[5, VOCABULARY + 1, 6])
    specs = [
        pb.GenerationSpec(token_ids=ids, prompt_table=pb.PromptTable(embeddings=ROWS, token_extra_ids=[0, 7, 8])),
        pb.GenerationSpec(prompt_embeds=ROWS),
        pb.GenerationSpec(prompt_embeds=ROWS, truncate_prompt_tokens=1),
        pb.GenerationSpec(
            token_ids=ids,
            prompt_table=pb.PromptTable(embeddings=ROWS, token_extra_ids=[0, 7, 8]),
            truncate_prompt_tokens=2,
        ),
    ]
    responses = [await client.generate(spec) for spec in specs]
    submits = [call.submit for call in ring.calls]
    assert [submit.prompt for submit in submits] == [
        [5, VOCABULARY + 1, 6],
        [VOCABULARY, VOCABULARY + 1],
        [VOCABULARY + 1],
        [VOCABULARY + 1, 6],
    ]
    assert [submit.extras.tables.extra_ids for submit in submits] == [(0, 7, 8), (), (), (7, 8)]
    assert all(submit.extras.tables.tables == WIRE.tables for submit in submits)
    assert [response.usage.prompt_tokens for response in responses] == [3, 2, 1, 2]


async def test_virtual_tokens_have_no_text(client):
    output = pb.OutputOptions(echo=True)
    plain = await client.generate(text_spec("import os", output=output))
    with_table = await client.generate(text_spec("import os", output=output, prompt_table=TABLE))
    assert plain.outputs[0].text.startswith("import os")
    assert with_table.outputs[0].text.startswith("import os")


async def test_a_request_goes_where_its_own_rows_are_cached(ring, start):
    """An engine that has other rows with the same ids cached gets none of the requests."""
    matching, differing, _ = map(ring.add_engine, ("mine", "other", "without"))
    ring.add_detokenizer()
    client = await start()
    prompt = [*range(VOCABULARY, VOCABULARY + 2), *range(62)]
    for engine, data in ((matching, DATA), (differing, bytes(8))):
        virtual = VirtualTokens.of(VOCABULARY, PromptTables((Table.of(2, 2, "float16", data),)))
        chain = block_chain(root_hash(engine.fingerprint), prompt, 16, virtual.key)
        engine.journal.store(*map(short_hash, chain))
    placement = client.router.ring.placement
    await client.until(lambda: placement.cache_version(matching.epoch) == placement.cache_version(differing.epoch) == 4)
    for _ in range(5):
        await client.generate(pb.GenerationSpec(token_ids=pb.TokenIds(ids=prompt), prompt_table=TABLE))
    assert {call.engine for call in ring.calls} == {matching}


async def test_engines_that_do_not_support_rows_get_none(ring, start):
    ring.add_engine("without").hidden_size = 0
    capable = ring.add_engine("taking")
    ring.add_detokenizer()
    client = await start()
    for _ in range(5):
        await client.generate(text_spec(prompt_table=TABLE))
    assert {call.engine for call in ring.calls} == {capable}
    info = await client.models.GetModelInfo(admin_pb2.GetModelInfoRequest())
    assert info.model.hidden_size == 2


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (4, "rows of 2 values, but the model's hidden size is 4"),
        (0, "no engine supports embeddings with this model"),
    ],
)
async def test_rows_of_another_size_are_refused(ring, start, size, expected):
    ring.add_engine().hidden_size = size
    ring.add_detokenizer()
    client = await start()
    details = await refused(client.events(pb.GenerationSpec(prompt_embeds=ROWS)))
    assert details.fields == ["spec.prompt_embeds.shape"]
    assert expected in details.error.details()
    assert not ring.calls


async def test_the_rows_of_a_tenants_requests_are_bounded(client, ring):
    client.router.ring.requests._own_bytes = SharedSpace(4 * len(DATA))
    ring.script = hang
    tasks = [asyncio.ensure_future(client.events(text_spec(f"{i}", prompt_table=TABLE))) for i in range(2)]
    await client.until(lambda: len(ring.calls) == 2)
    details: Details = await refused(client.events(text_spec(prompt_table=TABLE)))
    assert details.info.reason == "OVERLOADED"
    # Another tenant finds room.
    other = client.events(text_spec("other", prompt_table=TABLE), metadata=(("x-sluice-tenant", "other"),))
    tasks.append(asyncio.ensure_future(other))
    await client.until(lambda: len(ring.calls) == 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.until(lambda: not client.router.ring.requests.open)
    third = asyncio.ensure_future(client.events(text_spec("3", prompt_table=TABLE)))
    await client.until(lambda: len(ring.calls) == 4)
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
