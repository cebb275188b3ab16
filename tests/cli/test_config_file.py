"""`sluice serve --config FILE`, and the ways to specify the model."""

import importlib
import json

import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.launch.local_ring import RingError


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Calls `sluice serve` with a settings file. Returns the arguments of the ring, and the command's result."""

    def serve(text: str | None, *arguments: str):
        ring_arguments: dict = {}

        def ring(model, **options):
            ring_arguments.update(options, model=model)
            ring_arguments.pop("observe")
            raise RingError("not started")

        monkeypatch.setattr(importlib.import_module("sluice.cli.serve"), "Ring", ring)
        file = tmp_path / "serve.yaml"
        if text is not None:
            file.write_text(text)
            arguments = ("--config", str(file), *arguments)
        return ring_arguments, CliRunner().invoke(app, ["serve", *arguments])

    return serve


def test_options_and_settings_are_read_from_the_file(served) -> None:
    ring_arguments, _ = served(
        "model: the/model\nport: 6000\nmax_batch_size: 8\ninsecure: true\npriority_aging_seconds: 5\n"
        "engine:\n  chunked_context: false\n  kv_host_memory: 8GiB\n"
        "router: {tenant_weights: {search: 2}}\ndetokenizer:\n"
    )
    assert (ring_arguments["model"], ring_arguments["port"]) == ("the/model", 6000)
    assert ring_arguments["engine_args"] == {"max_batch_size": 8, "chunked_context": False, "kv_host_memory": 8 << 30}
    assert ring_arguments["router_args"] == {"insecure": True, "tenant_weights": {"search": 2.0}}
    assert ring_arguments["detokenizer_args"] == {}
    assert ring_arguments["shared_args"] == {"priority_aging_seconds": 5.0}


def test_the_command_line_takes_precedence(served) -> None:
    ring_arguments, _ = served("model: a\nport: 6000\nengines: 2\n", "--port", "7000", "--model", "b")
    assert (ring_arguments["model"], ring_arguments["port"], ring_arguments["engines"]) == ("b", 7000, 2)
    assert served("model: a\n", "c")[0]["model"] == "c"
    file = "max_batch_size: 3\nengine:\n  max_batch_size: 2\n  threads: 4\n"
    for arguments, size in (((), 3), (("--max-batch-size", "5"), 5), (("--set", "engine.max_batch_size=6"), 6)):
        assert served(file, *arguments)[0]["engine_args"] == {"max_batch_size": size, "threads": 4}


def test_an_empty_file_and_an_empty_key_mean_the_defaults(served) -> None:
    assert served("")[0] == served(None)[0] == served("port:\n")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1\n", "unknown key prot; did you mean port?"),
        ("max-batch-size: 1\n", "unknown key max-batch-size; did you mean max_batch_size?"),
        ("config: other.yaml\n", "unknown key config"),
        ("port: 2.5\n", "--port"),
        ("port: 70000\n", "--port"),
        ("max_tokens_per_step: 9\n", "it is a setting: engine: max_tokens_per_step"),
        ("engine:\n  max_batch_sise: 9\n", "did you mean engine.max_batch_size?"),
        ("engine:\n  max_batch_size: 0\n", "engine.max_batch_size: must be greater than or equal to 1"),
        ("engine: 5\n", "engine must be a mapping of settings to values (got 5)"),
        ("engines: [1, 2]\n", "engines must be a single value"),
        ("[1]\n", "must be a YAML mapping"),
        ("a: {\n", "cannot read"),
        (
            "prot: 1\nmodl: m\nengine: {max_batch_sise: 9, dtype: int4}\n",
            "unknown key prot; did you mean port?; unknown key modl; did you mean model?; "
            "unknown setting engine.max_batch_sise; did you mean engine.max_batch_size?; engine.dtype: must be",
        ),
    ],
)
def test_errors_name_the_key(served, text, message) -> None:
    ring_arguments, result = served(text)
    assert ring_arguments == {}
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_model_as_argument_or_option(served) -> None:
    assert served(None, "m")[0]["model"] == served(None, "--model", "m")[0]["model"] == "m"
    ring_arguments, result = served(None, "m", "--model", "n")
    assert ring_arguments == {}
    assert json.loads(result.stderr)["error"] == "the model is given twice: m and --model n"
