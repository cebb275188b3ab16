"""`sluice lora` and `sluice prompt-adapter`, and the options --lora and --prompt-adapter of other commands."""

from typing import NamedTuple

import grpc
import pytest

from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure
from tests.fakes.prompt_files import some_rows, write
from tests.fakes.server import serve
from tests.fakes.server_script import Script


class Kind(NamedTuple):
    group: str
    name: str
    """In names of fields."""
    machines: str
    """On which PATH is."""
    loaded: str
    """What `load` prints of an adapter's size."""

    @property
    def id_field(self) -> str:
        return f"{self.name}_id"

    def add(self, script, adapter_id: str, size: int = 16, path: str = "") -> None:
        kind, size_field = (admin_pb2.Lora, "rank") if self.name == "lora" else (admin_pb2.PromptAdapter, "rows")
        fields = {self.id_field: adapter_id, size_field: size}
        getattr(script, f"{self.name}s")[adapter_id] = kind(**fields, path=path, version="0f" * 16)


@pytest.fixture(
    params=[
        Kind("lora", "lora", "engines", "rank 8"),
        Kind("prompt-adapter", "prompt_adapter", "routers", "8 rows"),
    ],
    ids=lambda kind: kind.group,
)
def kind(request) -> Kind:
    return request.param


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "adapter", some_rows(0))


def test_load_by_path(kind, sluice, script, address) -> None:
    result = sluice(kind.group, "load", "x", "/adapters/x")
    assert (result.exit_code, result.stdout) == (0, f"{address}: x, {kind.loaded}, version 1, loaded\n")
    request = admin_pb2.LoadLoraRequest if kind.name == "lora" else admin_pb2.LoadPromptAdapterRequest
    assert script.seen == [request(**{kind.id_field: "x"}, path="/adapters/x")]


def test_upload_to_every_router(kind, sluice, script, address, folder) -> None:
    second_script = Script()
    with serve(second_script) as second_address:
        result = sluice(
            *(kind.group, "load", "sql", "--upload", str(folder)),
            *("--address", f"{address},{second_address}", "--token", "key"),
        )
    assert result.exit_code == 0
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == [
        f"{router_address}: sql" for router_address in (address, second_address)
    ]
    config, weights = ((folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    for router in (script, second_script):
        if kind.name == "lora":
            assert router.uploads == {"sql": [config, weights]}
        else:
            files = router.seen[-1].files
            assert (files.config_json, files.safetensors) == (config, weights)
        assert router.metadata[0]["authorization"] == "Bearer key"


@pytest.mark.parametrize("source", [[], ["/a", "--upload", "FOLDER"]])
def test_exactly_one_source_is_needed(kind, sluice, script, folder, source) -> None:
    arguments = [str(folder) if argument == "FOLDER" else argument for argument in source]
    result = sluice(kind.group, "load", "sql", *arguments)
    assert result.exit_code == 1
    assert f"either PATH, a folder on the {kind.machines}' machines, or --upload FOLDER" in result.stderr
    assert not script.seen


def test_a_folder_without_an_adapter(kind, sluice, script, tmp_path) -> None:
    result = sluice(kind.group, "load", "sql", "--upload", str(tmp_path))
    assert result.exit_code == 1
    assert "--upload: " in result.stderr
    assert "adapter_model.safetensors" in result.stderr
    assert not script.seen


def test_unload(kind, sluice, script, address) -> None:
    kind.add(script, "[b]")
    result = sluice(kind.group, "unload", "[b]")
    assert (result.exit_code, result.stdout) == (0, f"{address}: [b] unloaded\n")
    second_result = sluice(kind.group, "unload", "[b]")
    expected = f"error: {kind.id_field} is '[b]'; no adapter is loaded under this id\n"
    assert (second_result.exit_code, second_result.stderr) == (1, expected)


def test_list(kind, sluice, script) -> None:
    for name, path in (("sql", "/adapters/sql"), ("[bold]", ""), ("zz", "/z")):
        kind.add(script, name, path=path)
    result = sluice(kind.group, "list")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if "0f0f" in line]
    assert rows == [
        ["[bold]", "16", "0f" * 16, "uploaded"],
        ["sql", "16", "0f" * 16, "/adapters/sql"],
        ["zz", "16", "0f" * 16, "/z"],
    ]


def test_routers_with_different_adapters_are_listed_separately(kind, sluice, script, address) -> None:
    kind.add(script, "a")
    with serve(Script()) as second_address:
        result = sluice(kind.group, "list", "--address", f"{address},{second_address}")
        assert (result.exit_code, f"{second_address}:" in result.stdout) == (0, True)
        getattr(script, f"{kind.name}s").clear()
        assert f"{second_address}:" not in sluice(kind.group, "list", "--address", f"{address},{second_address}").stdout


def test_a_router_that_fails_is_named(kind, sluice, script, address) -> None:
    failure = Failure(grpc.StatusCode.PERMISSION_DENIED, "needs a token that is marked admin")
    with serve(Script(failure=failure)) as second_address:
        for command in (["load", "sql", "/a"], ["list"], ["unload", "sql"]):
            result = sluice(kind.group, *command, "--address", f"{second_address},{address}")
            assert result.exit_code == 1
            assert result.stderr == f"error: {second_address}: needs a token that is marked admin\n"
            assert "sql" in result.stdout


def test_generate_and_chat_with_an_adapter(kind, sluice, script) -> None:
    sluice("generate", "hi", f"--{kind.group}", "sql")
    sluice("chat", f"--{kind.group}", "sql", stdin="one\n/clear\ntwo\n")
    specs = [request.spec for request in script.seen if hasattr(request, "spec")]
    assert [getattr(spec, kind.id_field) for spec in specs] == ["sql"] * 3
