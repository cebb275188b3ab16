from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner

from sluice.cli import app
from tests.fakes.server import Script, serve


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
