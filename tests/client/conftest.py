from collections.abc import Iterator

import pytest

from tests.fakes.server import Script, serve


@pytest.fixture
def script() -> Script:
    """What the fake server answers; change it before the call."""
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serve(script) as found:
        yield found
