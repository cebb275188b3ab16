"""`sluice prompt-adapter`, and the option --prompt-adapter of other commands."""

import pytest

from sluice.v1 import admin_pb2
from tests.fakes.prompt_files import some_rows, write


def test_load_by_path(sluice, script, address) -> None:
    result = sluice("prompt-adapter", "load", "terse", "/prompts/terse")
    assert (result.exit_code, result.stdout) == (0, f"{address}: terse, 8 rows, version 1, loaded\n")
    assert script.seen == [admin_pb2.LoadPromptAdapterRequest(prompt_adapter_id="terse", path="/prompts/terse")]


def test_upload(sluice, script, address, tmp_path) -> None:
    folder = write(tmp_path / "terse", some_rows(0))
    assert sluice("prompt-adapter", "load", "terse", "--upload", str(folder)).exit_code == 0
    assert script.seen[-1].files.safetensors == (folder / "adapter_model.safetensors").read_bytes()
    result = sluice("prompt-adapter", "load", "terse", "--upload", str(tmp_path))
    assert (result.exit_code, "--upload: " in result.stderr) == (1, True)


@pytest.mark.parametrize("source", [[], ["/a", "--upload", "FOLDER"]])
def test_exactly_one_source_is_needed(sluice, script, tmp_path, source) -> None:
    arguments = [str(tmp_path) if argument == "FOLDER" else argument for argument in source]
    result = sluice("prompt-adapter", "load", "x", *arguments)
    assert result.exit_code == 1
    assert "either PATH, a folder on the routers' machines, or --upload FOLDER" in result.stderr
    assert not script.seen


def test_list_and_unload(sluice, script, address) -> None:
    script.prompt_adapters["[b]"] = admin_pb2.PromptAdapter(prompt_adapter_id="[b]", rows=16, version="0f" * 16)
    rows = [line.split() for line in sluice("prompt-adapter", "list").stdout.splitlines() if "0f0f" in line]
    assert rows == [["[b]", "16", "0f" * 16, "uploaded"]]
    assert sluice("prompt-adapter", "unload", "[b]").stdout == f"{address}: [b] unloaded\n"
    second_result = sluice("prompt-adapter", "unload", "[b]")
    expected = "error: prompt_adapter_id is '[b]'; no adapter is loaded under this id\n"
    assert (second_result.exit_code, second_result.stderr) == (1, expected)


def test_generate_and_chat(sluice, script) -> None:
    sluice("generate", "hi", "--prompt-adapter", "terse")
    sluice("chat", "--prompt-adapter", "terse", stdin="one\n")
    assert [request.spec.prompt_adapter_id for request in script.seen if hasattr(request, "spec")] == ["terse", "terse"]
