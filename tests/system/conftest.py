import pytest

from sluice.launch import Ring


@pytest.fixture(scope="session")
def ring():
    """A ring of real processes, as `sluice serve` starts it."""
    with Ring(engines=1, detokenizers=2) as ring:
        yield ring
