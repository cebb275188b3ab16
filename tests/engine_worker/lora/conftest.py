import pytest

from tests.engine_worker.lora.engines import lora_runner
from tests.engine_worker.lora.oracle import Oracle, write_adapter
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "model"
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return folder


@pytest.fixture(scope="session")
def oracle(model):
    return Oracle(model)


@pytest.fixture(scope="session")
def tuned(model):
    """Folders of three adapters of the model, of different ranks."""
    return [write_adapter(model.parent / f"tuned{i}", model, i, rank=4 + 8 * i) for i in range(3)]


@pytest.fixture
def library(model):
    return lora_runner(model).adapters
