"""Adapters at every router: what LoRA adapters and prompt adapters have in common, and what only one kind has."""

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2

from sluice.client import (
    AdapterMissing,
    AdapterNotFound,
    AsyncClient,
    Client,
    Forbidden,
    InvalidRequest,
    Lora,
    PromptAdapter,
    RouterLoras,
    RouterPromptAdapters,
    Unavailable,
    read_lora,
)
from sluice.client.adapters import PART_BYTES, Upload, is_cut_short
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from tests.fakes.failures import Failure
from tests.fakes.prompt_files import some_rows, write


@dataclass
class Kind:
    name: str
    of_router: Callable[..., Any]
    adapter: Callable[..., Any]
    size: str
    one_source: str
    """Part of the error if not exactly one source is given."""

    def load(self, client, **source):
        return getattr(client, f"load_{self.name}")("x", **source)

    def unload(self, client):
        return getattr(client, f"unload_{self.name}")("x")

    def list(self, client):
        return getattr(client, f"list_{self.name}s")()

    def at(self, script) -> dict[str, Any]:
        """The adapters of a fake router by id."""
        return getattr(script, f"{self.name}s")

    def message(self, adapter_id: str, size: int = 1, **fields: str) -> Any:
        kind = admin_pb2.Lora if self.name == "lora" else admin_pb2.PromptAdapter
        return kind(**{f"{self.name}_id": adapter_id, self.size: size}, **fields)


@pytest.fixture(params=["lora", "prompt_adapter"])
def kind(request):
    if request.param == "lora":
        return Kind("lora", RouterLoras, Lora, "rank", "give either path")
    return Kind("prompt_adapter", RouterPromptAdapters, PromptAdapter, "rows", "give exactly one of rows; folder")


async def test_all_pages_are_listed(kind, both, script, second) -> None:
    kind.at(script).update({name: kind.message(name) for name in "abcde"})
    kind.at(second)["f"] = kind.message("f", 2, path="/f", version="v")
    expected = [
        kind.of_router(both[0], tuple(kind.adapter(name, "", 1) for name in "abcde")),
        kind.of_router(both[1], (kind.adapter("f", "v", 2, "/f"),)),
    ]
    with Client(both) as client:
        assert kind.list(client) == expected
    async with AsyncClient(both) as client:
        assert await kind.list(client) == expected
    assert [request.page_token for request in script.seen] == ["", "b", "d"] * 2
    assert len(second.seen) == 2


async def test_unloading_fails_if_no_router_has_the_adapter(kind, both, script, second) -> None:
    """A router that has learned of the change from another router counts as successful."""
    for router in (script, second):
        kind.at(router)["x"] = kind.message("x")
        with Client(both) as client:
            assert kind.unload(client) == [kind.of_router(router_address) for router_address in both]
            with pytest.raises(AdapterNotFound, match=f"{kind.name}_id is 'x'; no adapter is loaded under this id"):
                kind.unload(client)
        assert not kind.at(router)
    async with AsyncClient(both) as client:
        with pytest.raises(AdapterNotFound):
            await kind.unload(client)


async def test_a_failure_of_one_router_is_in_its_result(kind, both, script) -> None:
    """If one router succeeded, no error is raised. Calls are not retried."""
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE)
    with Client(both, retry_timeout=10) as client:
        failed, loaded = kind.load(client, path="/a")
        assert isinstance(failed.error, Unavailable)
        assert failed == kind.of_router(both[0], error=failed.error)
        assert loaded == kind.of_router(both[1], (kind.adapter("x", "1", 8, "/a"),))
        assert [type(result.error) for result in kind.list(client)] == [Unavailable, type(None)]
    async with AsyncClient(both, retry_timeout=10) as client:
        assert [type(result.error) for result in await kind.unload(client)] == [Unavailable, type(None)]
    assert len(script.seen) == 3


async def test_the_first_error_is_raised_if_all_routers_failed(kind, both, script, second) -> None:
    script.failure = second.failure = Failure(grpc.StatusCode.PERMISSION_DENIED, "adapters are loaded with a token")
    with Client(both) as client:
        for call in (lambda: kind.load(client, path="/a"), lambda: kind.unload(client), lambda: kind.list(client)):
            with pytest.raises(Forbidden, match="with a token"):
                call()
    async with AsyncClient(both) as client:
        with pytest.raises(Forbidden):
            await kind.list(client)


@pytest.mark.parametrize("source", [{}, {"path": "/a", "folder": "b"}])
async def test_exactly_one_source_is_required(kind, address, script, source) -> None:
    with Client(address) as client, pytest.raises(TypeError, match=kind.one_source):
        kind.load(client, **source)
    async with AsyncClient(address) as client:
        with pytest.raises(TypeError, match=kind.one_source):
            await kind.load(client, **source)
    assert not script.seen


CONFIG, WEIGHTS = b'{"r": 8}', bytes(range(256)) * (PART_BYTES // 256) + b"the end"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(CONFIG)
    (tmp_path / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return tmp_path


async def test_every_router_loads_a_path(both, script, second) -> None:
    loaded = [RouterLoras(router_address, (Lora("sql", "1", 8, "/adapters/sql"),)) for router_address in both]
    with Client(both) as client:
        assert client.load_lora("sql", path="/adapters/sql") == loaded
    async with AsyncClient(both) as client:
        assert await client.load_lora("sql", path="/adapters/sql", model="tiny") == loaded
    expected = [admin_pb2.LoadLoraRequest(lora_id="sql", path="/adapters/sql", model=model) for model in ("", "tiny")]
    assert script.seen == second.seen == expected


async def test_a_folder_is_uploaded_to_every_router(both, script, second, folder) -> None:
    with Client(both) as client:
        loaded = client.load_lora("sql", folder=folder)
    first, last = loaded
    assert first.loras == last.loras
    assert (first.loras[0].lora_id, first.loras[0].path) == ("sql", "")
    async with AsyncClient(both) as client:
        assert await client.load_lora("again", folder=str(folder)) != loaded
    for router in (script, second):
        assert set(router.uploads) == {"sql", "again"}
        for parts in router.uploads.values():
            assert parts == [CONFIG, WEIGHTS[:PART_BYTES], b"the end"]


async def test_an_upload_uses_little_memory(address, script, folder) -> None:
    size = 96 << 20
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.truncate(size)
    script.keeps_uploads = False
    tracemalloc.start()
    try:
        with Client(address) as client:
            client.load_lora("large", folder=folder)
        async with AsyncClient(address) as client:
            await client.load_lora("larger", folder=folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(script.loras) == {"large", "larger"}
    assert peak < size / 4


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_missing_file(address, script, folder, missing) -> None:
    (folder / missing).unlink()
    with Client(address) as client, pytest.raises(FileNotFoundError, match=missing):
        client.load_lora("sql", folder=folder)
    async with AsyncClient(address) as client:
        with pytest.raises(FileNotFoundError, match=missing):
            await client.load_lora("sql", folder=folder)
    assert not script.seen


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file whose reads fail")
async def test_an_unreadable_file(address, script, folder) -> None:
    """The error of the file is raised, not that of the call, and nothing is loaded."""
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/proc/self/mem")
    with Client(address) as client, pytest.raises(OSError, match="Input/output error"):
        client.load_lora("sql", folder=folder)
    async with AsyncClient(address) as client:
        with pytest.raises(OSError, match="Input/output error"):
            await client.load_lora("sql", folder=folder)
    assert not script.loras


def test_a_configuration_that_is_too_large(address, folder) -> None:
    (folder / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1))
    with Client(address) as client, pytest.raises(ValueError, match="more than 1048576 bytes"):
        client.load_lora("sql", folder=folder)


def test_a_request_names_an_adapter_or_has_its_weights(address, script, folder) -> None:
    with Client(address) as client:
        client.generate("x", lora_id="sql")
        client.generate("x", lora_weights=read_lora(folder))
    with_id, with_weights = (request.spec for request in script.seen)
    assert with_id == pb.GenerationSpec(text="x", lora_id="sql")
    assert with_weights.lora_weights == pb.LoraWeights(config_json=CONFIG, safetensors=WEIGHTS)


def test_weights_of_the_wrong_type(address) -> None:
    with Client(address) as client:
        with pytest.raises(TypeError, match="lora_weights"):
            client.generate("x", lora_weights={"config_json": 3, "safetensors": b""})
        with pytest.raises((TypeError, InvalidRequest), match="lora_weights"):
            client.generate("x", lora_weights={"weights": b""})


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", AdapterNotFound),
        (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_MISSING", AdapterMissing),
    ],
)
def test_errors_of_adapters(address, script, code, reason, kind) -> None:
    script.failure = Failure(code, "it is gone", (error_details_pb2.ErrorInfo(reason=reason),))
    with Client(address) as client, pytest.raises(kind, match="it is gone") as caught:
        client.generate("x", lora_id="sql")
    assert (caught.value.reason, caught.value.retryable) == (reason, False)


def test_an_upload_is_retried_if_grpc_has_lost_its_answer() -> None:
    def status(code, details):
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)

    lost = status(grpc.StatusCode.INTERNAL, "Internal error from Core")
    upload = Upload.__new__(Upload)
    assert is_cut_short(upload, lost)
    assert not is_cut_short(admin_pb2.LoadLoraRequest(), lost)
    assert not is_cut_short(upload, status(grpc.StatusCode.INTERNAL, "an internal error"))
    assert not is_cut_short(upload, ValueError("no status"))


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
