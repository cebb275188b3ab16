import pytest

from tests.engine_worker.lora.oracle import Oracle
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "model"
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return folder


@pytest.fixture(scope="session")
def oracle(model):
    return Oracle(model)
