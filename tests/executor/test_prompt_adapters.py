"""Prompt adapters of requests: loaded when a request first uses them, and again if the server has dropped them."""

from pathlib import Path

import pytest

from sluice.client import read_lora
from sluice.executor import GenerationRequest, LoRARequest, PromptAdapterRequest
from sluice.v1 import admin_pb2


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"rows")
    return tmp_path


def loads(script) -> list:
    return [request for request in script.seen if isinstance(request, admin_pb2.LoadPromptAdapterRequest)]


def requested_ids(script) -> list[str]:
    return [request.spec.prompt_adapter_id for request in script.seen if hasattr(request, "spec")]


def test_an_adapter_without_a_path_is_not_loaded(executor, script) -> None:
    executor.generate("x", prompt_adapter_request=PromptAdapterRequest("terse"))
    assert (loads(script), requested_ids(script)) == ([], ["terse"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_is_uploaded_when_first_used(local, script, folder, streaming) -> None:
    terse = PromptAdapterRequest("terse", 1, folder)
    for _ in range(2):
        assert local.generate_async("x", streaming=streaming, prompt_adapter_request=terse).result(60).outputs[0].text
    assert len(local.generate(["a", "b"], prompt_adapter_request=[terse, None], use_tqdm=False)) == 2
    (load,) = loads(script)
    assert (load.prompt_adapter_id, load.files) == ("terse", admin_pb2.PromptAdapterFiles(**read_lora(folder)))
    assert sorted(requested_ids(script)) == ["", "terse", "terse", "terse"]


def test_with_a_shared_server_a_path_is_on_the_routers_machines(executor, script) -> None:
    for _ in range(2):
        executor.generate("x", prompt_adapter_request=PromptAdapterRequest("terse", 1, "/prompts/terse"))
    assert loads(script) == [admin_pb2.LoadPromptAdapterRequest(prompt_adapter_id="terse", path="/prompts/terse")]


def test_together_with_a_lora_adapter_of_the_same_name(local, script, folder) -> None:
    adapters = {
        "lora_request": LoRARequest("a", 1, folder),
        "prompt_adapter_request": PromptAdapterRequest("a", 1, folder),
    }
    local.generate("x", **adapters)
    script.loras.clear()
    script.prompt_adapters.clear()
    local.generate("x", **adapters)
    assert len(loads(script)) == 2
    assert list(script.loras) == list(script.prompt_adapters) == ["a"]


def test_a_full_server_unloads_an_idle_adapter(local, script, folder) -> None:
    script.max_loras = 1
    for name in "ab":
        local.generate("x", prompt_adapter_request=PromptAdapterRequest(name, 1, folder))
    assert list(script.prompt_adapters) == ["b"]


def test_names_of_the_fields() -> None:
    adapter = PromptAdapterRequest("terse", 7, Path("/prompts/terse"))
    assert (adapter.name, adapter.adapter_id, adapter.local_path) == ("terse", 7, "/prompts/terse")
    names = {"prompt_adapter_name": "terse", "prompt_adapter_id": 7, "prompt_adapter_local_path": "/prompts/terse"}
    assert adapter == PromptAdapterRequest(**names)
    with pytest.raises(TypeError, match="prompt_adapter_request must be a PromptAdapterRequest"):
        GenerationRequest("x", prompt_adapter_request="terse")
