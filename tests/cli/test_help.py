"""Help and shell completion, for all commands and services."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize(
    "command",
    [
        [],
        ["serve"],
        ["generate"],
        ["chat"],
        ["health"],
        ["stats"],
        ["bench"],
        ["call"],
        ["serving-version"],
        ["lora"],
        ["lora", "load"],
        ["prompt-adapter"],
        ["prompt-adapter", "load"],
        ["keygen"],
        ["protos"],
        ["protos", "export"],
    ],
)
def test_help_of_commands(command, flag) -> None:
    result = CliRunner().invoke(app, [*command, flag])
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


@pytest.mark.process
@pytest.mark.parametrize("service", ["router", "engine_worker", "detok_service"])
def test_help_of_services(service) -> None:
    process = subprocess.run([sys.executable, "-m", service, "-h"], capture_output=True, text=True, check=True)
    assert process.stdout.startswith(f"usage: python -m {service}")


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "expected"), [("sluice se", "serve"), ("sluice serve --metr", "--metrics-port"), ("sluice pro", "protos")]
)
def test_bash_completes(words, expected) -> None:
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_SLUICE_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "sluice"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    assert expected in completed.stdout.split()


def test_completion_is_shown_for_a_shell(monkeypatch) -> None:
    """The shell is named, because typer would otherwise detect the shell that started the tests."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="sluice")
    assert result.exit_code == 0
    assert "_SLUICE_COMPLETE=complete_bash" in result.stdout
