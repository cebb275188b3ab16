from collections.abc import Iterator

import pytest

from tests.fakes.server import serve
from tests.fakes.server_script import Script


@pytest.fixture
def script() -> Script:
    """What the fake server answers; change it before the call."""
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serve(script) as found:
        yield found
