"""LoRA adapters of requests: loaded when a request first uses them, and again if the server has dropped them."""

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from sluice.client import AdapterNotFound, Overloaded
from sluice.executor import (
    GenerationExecutor,
    LoRARequest,
    PeftCacheConfig,
    PromptAdapterRequest,
    RequestError,
    SamplingParams,
)
from sluice.executor.adapters import MAX_LOADS, AdaptersOfKind
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure
from tests.fakes.processes import wait_until


@pytest.fixture
def adapter(tmp_path):
    """Returns a function that creates an adapter by name."""

    def make(name: str, weights: bytes = b"weights") -> LoRARequest:
        folder: Path = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_bytes(b"{}")
        (folder / "adapter_model.safetensors").write_bytes(weights)
        return LoRARequest(name, 1, str(folder))

    return make


def loads(script) -> list[str]:
    kinds = (admin_pb2.LoadLoraRequest, admin_pb2.UploadLoraHeader)
    return [request.lora_id for request in script.seen if isinstance(request, kinds)]


def requested_ids(script) -> list[str]:
    return [request.spec.lora_id for request in script.seen if hasattr(request, "spec")]


def test_an_adapter_without_a_path_is_not_loaded(executor, script) -> None:
    executor.generate("x", lora_request=LoRARequest("sql"))
    assert (loads(script), requested_ids(script)) == ([], ["sql"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_is_uploaded_when_first_used(local, script, adapter, streaming) -> None:
    sql = adapter("sql")
    for _ in range(2):
        assert local.generate_async("x", streaming=streaming, lora_request=sql).result(60).outputs[0].text
    assert local.generate(["a", "b", "c"], lora_request=[sql, None, adapter("python")], use_tqdm=False)
    assert sorted(loads(script)) == ["python", "sql"]
    assert script.uploads["sql"] == [b"{}", b"weights"]
    assert sorted(requested_ids(script)) == ["", "python", "sql", "sql", "sql"]


def test_with_a_shared_server_a_path_is_on_the_engines_machines(executor, script) -> None:
    for _ in range(2):
        executor.generate("x", lora_request=LoRARequest("sql", 1, "/adapters/sql"))
    assert loads(script) == ["sql"]
    assert script.seen[0] == admin_pb2.LoadLoraRequest(lora_id="sql", path="/adapters/sql")


def test_concurrent_requests_load_an_adapter_once(local, script, adapter) -> None:
    results = local.generate(["x"] * 50, lora_request=adapter("sql"), use_tqdm=False)
    assert len(results) == 50
    assert loads(script) == ["sql"]


async def test_concurrent_loads_are_limited() -> None:
    """A router would refuse more."""
    running, peak = 0, 0

    async def load(_: str, *, folder: str) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1

    kind = AdaptersOfKind(load, load, uploads=True)
    with ExitStack() as stack:
        adapters = [stack.enter_context(kind.use(LoRARequest(f"a{i}", i + 1, f"/{i}"))) for i in range(3 * MAX_LOADS)]
        await asyncio.gather(*(adapter.load() for adapter in adapters))
    assert peak == MAX_LOADS


def test_a_failed_load_fails_its_requests(local, script, adapter) -> None:
    """The next request that uses the adapter loads it again."""
    script.failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, "rank 512 is too high")
    with pytest.raises(RequestError, match="rank 512 is too high"):
        local.generate("x", lora_request=adapter("sql"))
    assert requested_ids(script) == []
    failed = local.generate_async("x", lora_request=adapter("sql"))
    with pytest.raises(RequestError):
        failed.result(60)
    assert failed.adapter_refused
    script.failure = None
    assert local.generate("x", lora_request=adapter("sql")).outputs[0].text
    with pytest.raises(RequestError, match="No such file"):
        local.generate("x", lora_request=LoRARequest("none", 2, "/nowhere"))
    assert local.generate("x", lora_request=adapter("none")).outputs[0].text


@pytest.mark.parametrize(
    ("option", "kind"), [("lora_request", LoRARequest), ("prompt_adapter_request", PromptAdapterRequest)]
)
def test_a_name_cannot_stand_for_two_adapters(local, adapter, option, kind) -> None:
    path, other_path = adapter("sql").path, adapter("python").path
    local.generate("x", **{option: kind("sql", 1, path)})
    for conflicting in (kind("sql", 1, other_path), kind("sql", 2, path)):
        with pytest.raises(RequestError, match="choose another name"):
            local.generate("x", **{option: conflicting})


@pytest.mark.parametrize("streaming", [False, True])
def test_an_adapter_that_the_server_dropped_is_loaded_again(local, script, adapter, streaming) -> None:
    sql = adapter("sql")
    local.generate("x", lora_request=sql)
    script.loras.clear()
    results = [local.generate_async("x", streaming=streaming, lora_request=sql) for _ in range(8)]
    assert all(result.result(60).outputs[0].text for result in results)
    assert len(loads(script)) == 2


def test_an_adapter_is_reloaded_only_once_per_request(local, script, adapter) -> None:
    script.loras = _AlwaysEmpty()
    with pytest.raises(RequestError) as caught:
        local.generate("x", lora_request=adapter("sql"))
    assert isinstance(caught.value.error, AdapterNotFound)
    assert len(loads(script)) == 2


class _AlwaysEmpty(dict):
    def __setitem__(self, *_: object) -> None:
        pass


def test_a_full_server_unloads_an_idle_adapter(local, script, adapter) -> None:
    script.max_loras = 2
    for name in "abab":
        local.generate("x", lora_request=adapter(name))
    local.generate("x", lora_request=adapter("c"))
    assert sorted(script.loras) == ["b", "c"]
    local.generate("x", lora_request=adapter("a"))
    assert sorted(script.loras) == ["a", "c"]
    assert loads(script)[:4] == ["a", "b", "c", "c"]


def test_adapters_of_a_shared_server_are_not_unloaded(executor, script) -> None:
    script.max_loras = 1
    executor.generate("x", lora_request=LoRARequest("a", 1, "/a"))
    with pytest.raises(RequestError) as caught:
        executor.generate_async("x", lora_request=LoRARequest("b", 2, "/b")).result(60)
    assert isinstance(caught.value.error, Overloaded)
    assert list(script.loras) == ["a"]


def test_a_batch_waits_while_no_adapter_is_idle(local, script, adapter) -> None:
    """A batch waits as for any overloaded server, while a single request fails."""
    script.max_loras, script.hangs = 1, True
    first = local.generate_async("x", lora_request=adapter("a"))
    assert wait_until(lambda: len(script.hanging) == 1)
    with pytest.raises(RequestError, match="too many adapters"):
        local.generate_async("x", lora_request=adapter("b")).result(60)

    retried: list[bool] = []

    def end_first() -> None:
        retried.append(wait_until(lambda: loads(script).count("b") >= 3))
        script.hangs = False
        first.abort()

    thread = threading.Thread(target=end_first)
    thread.start()
    assert local.generate(["x"], lora_request=adapter("b"), use_tqdm=False)[0].outputs[0].text
    thread.join()
    assert retried == [True]
    assert list(script.loras) == ["b"]


def test_the_allotted_time_includes_the_load(local, script, adapter) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=60))
    script.failure = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (retry,))
    result = local.generate(["x"], SamplingParams(), lora_request=adapter("sql"), allotted_time_ms=200, use_tqdm=False)
    assert result[0].outputs[0].finish_reason == "timeout"
    assert requested_ids(script) == []


@pytest.mark.parametrize("kind", [LoRARequest, PromptAdapterRequest])
@pytest.mark.parametrize("arguments", [("a", "1"), (3,), ("a", 1, 5)])
def test_fields_of_the_wrong_type(kind, arguments) -> None:
    with pytest.raises(TypeError):
        kind(*arguments)


def test_names_of_the_fields() -> None:
    adapter = LoRARequest("sql", 7, Path("/adapters/sql"))
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("sql", 7, "/adapters/sql")
    assert adapter == LoRARequest(lora_name="sql", lora_int_id=7, lora_path="/adapters/sql")


def test_settings_of_the_engines(monkeypatch) -> None:
    ring_options: dict = {}

    def ring(model, **options):
        ring_options.update(options)
        raise ValueError("not today")

    monkeypatch.setattr("sluice.executor.executor.LocalRing", ring)

    def engine_args(**options) -> dict:
        with pytest.raises(ValueError, match="not today"):
            GenerationExecutor.create(**options)
        return {name: value for name, value in ring_options["engine_args"].items() if name.startswith("lora")}

    assert engine_args() == {}
    assert engine_args(enable_lora=True) == {"lora": True}
    config = PeftCacheConfig(max_adapter_size=16, host_cache_size=1 << 20, lora_prefetch_dir="/adapters")
    expected = {"lora_max_adapter_size": 16, "lora_host_cache_size": 1 << 20, "lora_prefetch_dir": "/adapters"}
    assert engine_args(peft_cache_config=config) == {"lora": True, **expected}
