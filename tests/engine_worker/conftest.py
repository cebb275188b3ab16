import pytest

from tests.fakes.engine import EngineBench


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def both_overlaps(request, monkeypatch) -> None:
    """The test runs twice: without overlap, and with it (a step is launched before the previous one is collected)."""
    monkeypatch.setattr(EngineBench, "overlap", request.param)
