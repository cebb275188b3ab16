from collections.abc import Iterator

import pytest

from tests.fakes.gateway import running
from tests.fakes.server import serve
from tests.fakes.server_script import Script


@pytest.fixture
def script() -> Script:
    """The fake router's responses; tests change them before a call."""
    return Script()


@pytest.fixture
def router(script: Script) -> Iterator[str]:
    with serve(script) as address:
        yield address


@pytest.fixture
async def gateway(router):
    async with running(router) as running_gateway:
        yield running_gateway
