import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_worker.pool_files.memory import file_system_of
from tests.fakes.engine import EngineBench


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def both_overlaps(request, monkeypatch) -> None:
    """The test runs twice: without overlap, and with it (a step is launched before the previous one is collected)."""
    monkeypatch.setattr(EngineBench, "overlap", request.param)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A private folder in memory."""
    parent = Path("/dev/shm")
    if file_system_of(parent) != "tmpfs":
        pytest.skip("this system has no /dev/shm in memory")
    with tempfile.TemporaryDirectory(dir=parent, prefix="sluice-test-") as folder:
        yield Path(folder)
