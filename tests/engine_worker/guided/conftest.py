import pytest

from engine_worker.guided.guides import Guides
from tests.engine_worker.guided.tools import make


@pytest.fixture(scope="module")
def guides():
    found = make()
    yield found
    found.close()


@pytest.fixture
def fresh_guides() -> Guides:
    """Guides with separate processes, which the test may kill."""
    found = make()
    yield found
    found.close()
