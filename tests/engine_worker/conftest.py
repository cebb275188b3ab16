import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.host.memory_files import is_in_memory
from tests.fakes.engine import EngineBench


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def both_overlaps(request, monkeypatch) -> None:
    """The test runs twice: without overlap, and with it (a step is launched before the previous one is collected)."""
    monkeypatch.setattr(EngineBench, "overlap", request.param)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A private folder in memory."""
    parent = Path("/dev/shm")
    if not is_in_memory(parent):
        pytest.skip("this system has no /dev/shm in memory")
    with tempfile.TemporaryDirectory(dir=parent, prefix="sluice-test-") as folder:
        yield Path(folder)


@pytest.fixture
def small_memory(shared_memory: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system in memory, private and of the size that the test's parameter states, such as 8m."""
    folder = shared_memory / "small"
    folder.mkdir()
    options = f"size={request.param},mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        # Lazily: mappings may outlive the test.
        subprocess.run(["umount", "-l", folder], check=True)
