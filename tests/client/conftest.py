from collections.abc import Iterator

import pytest

from tests.fakes.server import serve
from tests.fakes.server_script import Script


@pytest.fixture
def script() -> Script:
    """The answers of the fake server, which a test may change before a call."""
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serve(script) as found:
        yield found
