import importlib
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.launch.local_ring import RingError


@pytest.fixture(autouse=True)
def _keep_output(monkeypatch) -> None:
    """A command that runs in the tests' process must not change their output."""
    monkeypatch.setattr(importlib.import_module("sluice.cli.serve"), "protect_output", lambda: None)


@pytest.fixture
def sluice(address: str) -> Callable:
    """Runs the command line with the fake server's address."""

    def run(*arguments: str, stdin: str | None = None):
        return CliRunner().invoke(app, list(arguments), input=stdin, env={"SLUICE_ADDRESS": address})

    return run


@pytest.fixture
def ring_options(monkeypatch) -> Callable[..., dict]:
    """Returns the options with which `sluice serve` would create its ring for some arguments."""

    def serve_options(*arguments: str) -> dict:
        received: dict = {}

        def ring(model, **options):
            received.update(options)
            raise RingError("not started")

        monkeypatch.setattr(importlib.import_module("sluice.cli.serve"), "Ring", ring)
        CliRunner().invoke(app, ["serve", *arguments])
        return received

    return serve_options
