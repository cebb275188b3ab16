"""The fingerprint of a model as an engine computes it."""

from dataclasses import replace

import pytest

from engine_worker.ringside.identity import fingerprint
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from sluice.checkpoint.folder import open_checkpoint
from sluice.tiny_model import path


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(str(path()))


def test_model_weights_dtype_and_window_change_the_fingerprint(checkpoint):
    fingerprints = {
        fingerprint(checkpoint, "checkpoint", "float32", ()),
        fingerprint(replace(checkpoint, fingerprint="other"), "checkpoint", "float32", ()),
        fingerprint(checkpoint, "random", "float32", ()),
        fingerprint(checkpoint, "checkpoint", "bfloat16", ()),
        fingerprint(checkpoint, "checkpoint", "float32", (64,)),
        fingerprint(checkpoint, "checkpoint", "float32", (6, 4)),
    }
    assert len(fingerprints) == 6
    assert all(len(each) == 16 for each in fingerprints)


def test_name_and_path_do_not_change_the_fingerprint(checkpoint, tmp_path):
    other = replace(checkpoint, path=tmp_path, name="another")
    assert fingerprint(other, "checkpoint", "float32", ()) == fingerprint(checkpoint, "checkpoint", "float32", ())


def test_a_runner_reports_its_dtype(checkpoint):
    config = RunnerConfig(device="cpu", dtype="auto", kv_cache_tokens=64, threads=1)
    runner = load_runner(checkpoint, config, lambda *_: None)
    assert runner.dtype == runner.choices["dtype"] == "float32"
