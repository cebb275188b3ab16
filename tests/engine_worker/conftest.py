import pytest

from tests.fakes.engine import EngineBench


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def either_way(request, monkeypatch) -> None:
    """The test runs twice: each step collected at once, and each launched before the one before it is collected."""
    monkeypatch.setattr(EngineBench, "overlap", request.param)
