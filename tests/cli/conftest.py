import importlib
from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.launch.local_ring import RingError
from tests.fakes.server import serve
from tests.fakes.server_script import Script


@pytest.fixture(autouse=True)
def own_output(monkeypatch) -> None:
    """A command that runs in the process of the tests leaves their output as it is."""
    monkeypatch.setattr(importlib.import_module("sluice.cli.serve"), "protect_output", lambda: None)


@pytest.fixture
def script() -> Script:
    """What the fake server answers; change it before the call."""
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serve(script) as found:
        yield found


@pytest.fixture
def sluice(address: str) -> Callable:
    """Runs the command line against the fake server."""

    def run(*arguments: str, stdin: str | None = None):
        return CliRunner().invoke(app, list(arguments), input=stdin, env={"SLUICE_ADDRESS": address})

    return run


@pytest.fixture
def asked_of_ring(monkeypatch) -> Callable[..., dict]:
    """The options with which `sluice serve`, called with some arguments, would make its ring."""

    def asked(*arguments: str) -> dict:
        given: dict = {}

        def ring(model, **options):
            given.update(options)
            raise RingError("not today")

        monkeypatch.setattr(importlib.import_module("sluice.cli.serve"), "Ring", ring)
        CliRunner().invoke(app, ["serve", *arguments])
        return given

    return asked
