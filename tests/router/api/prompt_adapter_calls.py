"""Calls that load and list prompt adapters, and what a router knows of them."""

import numpy as np

from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from sluice.wire.tables import Table
from tests.fakes.prompt_files import some_rows
from tests.router.conftest import text_spec

VOCABULARY = 4096
A, B, C = (some_rows(seed) for seed in range(3))


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
