import pytest

from tests.fakes.gateway import running


@pytest.fixture
async def gateway(address):
    async with running(address) as running_gateway:
        yield running_gateway
