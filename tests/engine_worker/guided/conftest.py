import pytest

from engine_worker.guided.guides import Guides
from tests.engine_worker.guided.tools import make


@pytest.fixture(scope="module")
def guides():
    found = make()
    yield found
    found.close()


@pytest.fixture
def own() -> Guides:
    """Guides whose processes a test may do anything to."""
    found = make()
    yield found
    found.close()
