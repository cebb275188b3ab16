import pytest

from sluice import Client
from sluice.launch import Ring


@pytest.fixture(scope="session")
def ring():
    """A ring of real processes, as `sluice serve` starts it."""
    with Ring(engines=1, detokenizers=2) as ring:
        yield ring


@pytest.fixture(scope="module")
def client(ring):
    """A client of the module's ring: the one above, or its own."""
    with Client(ring.address, timeout=200) as client:
        yield client
