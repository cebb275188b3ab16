"""Loads runners on OpenVINO from small random checkpoints."""

from pathlib import Path

from engine_worker.backend import load_runner
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.runner import ModelRunner
from tests.engine_worker.models.checkpoints import open_written


def load(folder: Path, **options: object) -> ModelRunner:
    config = RunnerConfig("cpu", **{"backend": "openvino", "kv_cache_tokens": 4096, "threads": 1} | options)
    return load_runner(open_written(folder), config, *[lambda *_: None] * 3)
