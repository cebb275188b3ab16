"""`sluice lora`, and the option --lora of other commands."""

import grpc
import pytest

from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure
from tests.fakes.server import serve
from tests.fakes.server_script import Script


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_load_by_path(sluice, script, address) -> None:
    result = sluice("lora", "load", "sql", "/adapters/sql")
    assert (result.exit_code, result.stdout) == (0, f"{address}: sql, rank 8, version 1, loaded\n")
    assert script.seen == [admin_pb2.LoadLoraRequest(lora_id="sql", path="/adapters/sql")]


def test_upload_to_every_router(sluice, script, address, folder) -> None:
    second_script = Script()
    with serve(second_script) as second_address:
        result = sluice(
            *("lora", "load", "sql", "--upload", str(folder)),
            *("--address", f"{address},{second_address}", "--token", "key"),
        )
    assert result.exit_code == 0
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == [
        f"{router_address}: sql" for router_address in (address, second_address)
    ]
    for router in (script, second_script):
        assert router.uploads == {"sql": [b"{}", b"weights"]}
        assert router.metadata[0]["authorization"] == "Bearer key"


@pytest.mark.parametrize("source", [[], ["/a", "--upload", "FOLDER"]])
def test_exactly_one_source_is_needed(sluice, script, folder, source) -> None:
    arguments = [str(folder) if argument == "FOLDER" else argument for argument in source]
    result = sluice("lora", "load", "sql", *arguments)
    assert result.exit_code == 1
    assert "either PATH, a folder on the engines' machines, or --upload FOLDER" in result.stderr
    assert not script.seen


def test_a_folder_without_an_adapter(sluice, script, tmp_path) -> None:
    result = sluice("lora", "load", "sql", "--upload", str(tmp_path))
    assert result.exit_code == 1
    assert "--upload: " in result.stderr
    assert "adapter_model.safetensors" in result.stderr
    assert not script.seen


def test_unload(sluice, script, address) -> None:
    script.loras["sql"] = admin_pb2.Lora(lora_id="sql")
    result = sluice("lora", "unload", "sql")
    assert (result.exit_code, result.stdout) == (0, f"{address}: sql unloaded\n")
    second_result = sluice("lora", "unload", "sql")
    assert (second_result.exit_code, second_result.stderr) == (
        1,
        "error: lora_id is 'sql'; no adapter is loaded under this id\n",
    )


def test_list(sluice, script) -> None:
    for name, path in (("sql", "/adapters/sql"), ("[bold]", ""), ("zz", "/z")):
        script.loras[name] = admin_pb2.Lora(lora_id=name, path=path, rank=16, version="0f" * 16)
    result = sluice("lora", "list")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if "0f0f" in line]
    assert rows == [
        ["[bold]", "16", "0f" * 16, "uploaded"],
        ["sql", "16", "0f" * 16, "/adapters/sql"],
        ["zz", "16", "0f" * 16, "/z"],
    ]


def test_routers_with_different_adapters_are_listed_separately(sluice, script, address) -> None:
    script.loras["a"] = admin_pb2.Lora(lora_id="a")
    with serve(Script()) as second_address:
        result = sluice("lora", "list", "--address", f"{address},{second_address}")
        assert (result.exit_code, f"{second_address}:" in result.stdout) == (0, True)
        script.loras.clear()
        assert f"{second_address}:" not in sluice("lora", "list", "--address", f"{address},{second_address}").stdout


def test_a_router_that_fails_is_named(sluice, script, address) -> None:
    failure = Failure(grpc.StatusCode.PERMISSION_DENIED, "needs a token that is marked admin")
    with serve(Script(failure=failure)) as second_address:
        for command in (["load", "sql", "/a"], ["list"], ["unload", "sql"]):
            result = sluice("lora", *command, "--address", f"{second_address},{address}")
            assert result.exit_code == 1
            assert result.stderr == f"error: {second_address}: needs a token that is marked admin\n"
            assert "sql" in result.stdout


def test_generate_and_chat_with_an_adapter(sluice, script) -> None:
    sluice("generate", "hi", "--lora", "sql")
    assert script.seen[-1].spec.lora_id == "sql"
    sluice("chat", "--lora", "sql", stdin="one\n/clear\ntwo\n")
    assert [request.spec.lora_id for request in script.seen[-2:]] == ["sql", "sql"]
