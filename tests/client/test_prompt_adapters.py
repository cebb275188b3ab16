"""Prompt adapters: loaded, unloaded and listed at every router."""

import numpy as np

from sluice.client import AsyncClient, Client, PromptAdapter, RouterPromptAdapters, Unavailable
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from tests.fakes.prompt_files import some_rows, write

ROWS = some_rows(0)


async def test_each_source_is_loaded_at_every_router(both, script, second, tmp_path) -> None:
    folder = write(tmp_path / "terse", ROWS)
    sources = [{"rows": ROWS}, {"folder": folder}, {"path": "/prompts/terse"}]
    files = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    for source in sources:
        path = source.get("path", "")
        loaded = [
            RouterPromptAdapters(router_address, (PromptAdapter("terse", "1", 8, path),)) for router_address in both
        ]
        with Client(both) as client:
            assert client.load_prompt_adapter("terse", **source) == loaded
        async with AsyncClient(both) as client:
            assert await client.load_prompt_adapter("terse", **source) == loaded
    expected = [
        {"rows": pb.Embeddings(shape=[3, 2], dtype="float32", data=ROWS.tobytes())},
        {"files": admin_pb2.PromptAdapterFiles(config_json=files[0], safetensors=files[1])},
        {"path": "/prompts/terse"},
    ]
    requests = [admin_pb2.LoadPromptAdapterRequest(prompt_adapter_id="terse", **fields) for fields in expected]
    assert script.seen == second.seen == [request for request in requests for _ in range(2)]


def test_an_unreachable_router_has_an_error(address) -> None:
    with Client([address, "127.0.0.1:1"], timeout=30) as client:
        first, second = client.load_prompt_adapter("x", rows=[[0.0, 1.0]])
    assert first.error is None
    assert isinstance(second.error, Unavailable)


def test_a_request_names_an_adapter(address, script) -> None:
    with Client(address) as client:
        client.generate("t", prompt_adapter_id="x")
    assert script.seen[-1].spec.prompt_adapter_id == "x"


def test_rows_of_other_types(address, script) -> None:
    with Client(address) as client:
        client.load_prompt_adapter("x", rows=ROWS.astype(np.float16))
    assert script.seen[-1].rows.dtype == "float16"
