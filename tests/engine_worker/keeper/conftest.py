from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_worker.keeper.client import KeeperClient
from sluice.lanes.keys import PLAIN
from tests.engine_worker.keeper.keepers import RunningKeeper


@pytest.fixture
def disk_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def keeper(shared_memory: Path, disk_folder: Path) -> Iterator[RunningKeeper]:
    with RunningKeeper(shared_memory, disk_folder) as running:
        yield running


@pytest.fixture
def client() -> Iterator[KeeperClient]:
    client = KeeperClient(PLAIN)
    yield client
    client.close()
