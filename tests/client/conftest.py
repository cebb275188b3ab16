from collections.abc import Iterator

import pytest

from tests.fakes.server import serve
from tests.fakes.server_script import Script
from tests.fakes.storyteller import Plan, tell_all


@pytest.fixture
def script() -> Script:
    """The answers of the fake server, which a test may change before a call."""
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serve(script) as found:
        yield found


@pytest.fixture
def plan() -> Plan:
    """When and how the routers break off, which a test may change before a call."""
    return Plan()


@pytest.fixture
def addresses(plan) -> Iterator[list[str]]:
    with tell_all(2, plan) as found:
        yield found
