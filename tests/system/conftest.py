import pytest

from sluice.launch import Ring


@pytest.fixture(scope="session")
def ring():
    """The ring that `sluice serve` starts, as real processes."""
    with Ring(engines=1, detokenizers=2) as ring:
        yield ring
