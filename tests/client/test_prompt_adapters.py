"""Prompt adapters: loaded, unloaded and listed at every router."""

import numpy as np
import pytest

from sluice.client import AdapterNotFound, AsyncClient, Client, PromptAdapter, RouterPromptAdapters, Unavailable
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from tests.fakes.prompt_files import some_rows, write
from tests.fakes.server import serve
from tests.fakes.server_script import Script

ROWS = some_rows(0)


@pytest.fixture
def second():
    return Script()


@pytest.fixture
def addresses(address, second):
    with serve(second) as second_address:
        yield [address, second_address]


async def test_each_source_is_loaded_at_every_router(addresses, script, second, tmp_path) -> None:
    folder = write(tmp_path / "terse", ROWS)
    sources = [{"rows": ROWS}, {"folder": folder}, {"path": "/prompts/terse"}]
    files = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    for source in sources:
        path = source.get("path", "")
        loaded = [
            RouterPromptAdapters(router_address, (PromptAdapter("terse", "1", 8, path),))
            for router_address in addresses
        ]
        with Client(addresses) as client:
            assert client.load_prompt_adapter("terse", **source) == loaded
        async with AsyncClient(addresses) as client:
            assert await client.load_prompt_adapter("terse", **source) == loaded
    expected = [
        {"rows": pb.Embeddings(shape=[3, 2], dtype="float32", data=ROWS.tobytes())},
        {"files": admin_pb2.PromptAdapterFiles(config_json=files[0], safetensors=files[1])},
        {"path": "/prompts/terse"},
    ]
    requests = [admin_pb2.LoadPromptAdapterRequest(prompt_adapter_id="terse", **fields) for fields in expected]
    assert script.seen == second.seen == [request for request in requests for _ in range(2)]


async def test_all_pages_are_listed(addresses, script) -> None:
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        script.prompt_adapters[name] = admin_pb2.PromptAdapter(prompt_adapter_id=name, rows=4, version="0f")
    expected = [
        RouterPromptAdapters(addresses[0], tuple(PromptAdapter(name, "0f", 4) for name in names)),
        RouterPromptAdapters(addresses[1]),
    ]
    with Client(addresses) as client:
        assert client.list_prompt_adapters() == expected
    async with AsyncClient(addresses) as client:
        assert await client.list_prompt_adapters() == expected


async def test_unloading_fails_if_no_router_has_the_adapter(addresses, script, second) -> None:
    for updated_router in (script, second):
        for router in (script, second):
            router.prompt_adapters["x"] = admin_pb2.PromptAdapter(prompt_adapter_id="x")
        # The second router has already passed the change on.
        del updated_router.prompt_adapters["x"]
        with Client(addresses) as client:
            assert client.unload_prompt_adapter("x") == [
                RouterPromptAdapters(router_address) for router_address in addresses
            ]
    async with AsyncClient(addresses) as client:
        with pytest.raises(AdapterNotFound, match="prompt_adapter_id is 'x'"):
            await client.unload_prompt_adapter("x")


def test_an_unreachable_router_has_an_error(address) -> None:
    with Client([address, "127.0.0.1:1"], timeout=30) as client:
        first, second = client.load_prompt_adapter("x", rows=[[0.0, 1.0]])
    assert first.error is None
    assert isinstance(second.error, Unavailable)


@pytest.mark.parametrize("source", [{}, {"rows": ROWS, "path": "/x"}])
def test_exactly_one_source_is_required(address, script, source) -> None:
    with Client(address) as client, pytest.raises(TypeError, match="give exactly one of rows; folder"):
        client.load_prompt_adapter("x", **source)
    assert not script.seen


def test_a_request_names_an_adapter(address, script) -> None:
    with Client(address) as client:
        client.generate("t", prompt_adapter_id="x")
    assert script.seen[-1].spec.prompt_adapter_id == "x"


def test_rows_of_other_types(address, script) -> None:
    with Client(address) as client:
        client.load_prompt_adapter("x", rows=ROWS.astype(np.float16))
    assert script.seen[-1].rows.dtype == "float16"
