from collections.abc import Iterator

import pytest

from tests.fakes.breaking_routers import Plan, run_routers
from tests.fakes.server import serve
from tests.fakes.server_script import Script


@pytest.fixture
def second() -> Script:
    """The answers of another fake server."""
    return Script()


@pytest.fixture
def both(address: str, second: Script) -> Iterator[list[str]]:
    """The addresses of both servers."""
    with serve(second) as second_address:
        yield [address, second_address]


@pytest.fixture
def plan() -> Plan:
    """When and how the fake routers fail. Tests change it before a call."""
    return Plan()


@pytest.fixture
def addresses(plan) -> Iterator[list[str]]:
    with run_routers(2, plan) as router_addresses:
        yield router_addresses
