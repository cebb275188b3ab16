import pytest

from engine_worker.guided.guides import Guides
from tests.engine_worker.guided.tools import make


@pytest.fixture(scope="module")
def guides():
    shared_guides = make()
    yield shared_guides
    shared_guides.close()


@pytest.fixture
def fresh_guides() -> Guides:
    """Guides with separate processes, which the test may kill."""
    new_guides = make()
    yield new_guides
    new_guides.close()
