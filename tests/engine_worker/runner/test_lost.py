"""Checks of the device after a failed step."""

import pytest

from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from engine_worker.runner.runner import ModelRunner
from engine_worker.step import DeviceLostError
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint

ERROR = "CUDA error: an illegal memory access was encountered"


class FakeFollowers:
    """The other ranks of a group."""

    def __init__(self) -> None:
        self.lost: list[Exception] = []

    def send_step(self, moves, arrays, processed) -> None:
        pass

    def on_step_failed(self, error: Exception) -> None:
        self.lost.append(error)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return load_runner(open_written(folder), RunnerConfig("cpu", kv_cache_tokens=256, threads=1), lambda *_: None)


def test_a_working_device(runner, monkeypatch):
    checked = []
    runner.check()
    monkeypatch.setattr("engine_worker.runner.torch_forward.synchronize", checked.append)
    runner.check()
    assert [device.type for device in checked] == ["cpu"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_device(runner, overlap, monkeypatch):
    def wait_for(device):
        raise RuntimeError(f"{ERROR}\nCUDA kernel errors might be reported at some other API call")

    ranks = FakeFollowers()
    lost = ModelRunner(runner._forward, overlap, ranks)
    monkeypatch.setattr("engine_worker.runner.torch_forward.synchronize", wait_for)
    with pytest.raises(DeviceLostError, match=f"^cpu has failed: {ERROR}$") as caught:
        lost.check()
    assert ranks.lost == [caught.value]
