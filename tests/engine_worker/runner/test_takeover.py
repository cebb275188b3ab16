"""A stream continues from another engine's blocks with the same tokens."""

from pathlib import Path

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.extensions import Extensions
from engine_worker.runner.load import load_runner
from engine_worker.runner.runner import ModelRunner
from sluice import tiny_model
from sluice.checkpoint.folder import open_checkpoint
from tests.engine_worker.takeover import check_takeover


def load(folder: PoolFolder) -> ModelRunner:
    config = RunnerConfig("cpu", backend="torch", kv_cache_tokens=512, threads=1)
    return load_runner(
        open_checkpoint(str(tiny_model.path())), config, lambda *_: None, extensions=Extensions(pool_folder=folder)
    )


def test_a_stream_continues_on_a_twin_and_after_a_restart(shared_memory: Path) -> None:
    check_takeover(load, shared_memory)
