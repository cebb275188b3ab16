"""LoRA adapters: loaded, uploaded, unloaded and listed at every router."""

import sys
import tracemalloc

import grpc
import pytest
from google.rpc import error_details_pb2

from sluice.client import (
    AdapterMissing,
    AdapterNotFound,
    AsyncClient,
    Client,
    InvalidRequest,
    Lora,
    RouterLoras,
    read_lora,
)
from sluice.client.loras import PART_BYTES, Upload, is_cut_short
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from tests.fakes.failures import Failure

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
