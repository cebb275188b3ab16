"""DebugConfig with real rings, as a queue and as files."""

import logging
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import sluice.trtllm as trtllm
from sluice.settings.engine import DEBUG_INPUTS
from sluice.trtllm.debug_tensors import debug_names
from tests.trtllm.running import GREEDY, PROMPT, results, start

pytestmark = pytest.mark.process


def folder(caplog) -> Path:
    """The folder that the log names."""
    (message,) = (record.getMessage() for record in caplog.records if "debug tensors" in record.getMessage())
    return Path(message.rpartition(" ")[2])


@pytest.mark.long
def test_a_queue_of_the_newest_steps() -> None:
    config = trtllm.DebugConfig(debug_tensor_names=["sequence_length", "input_ids"], debug_tensors_max_iterations=3)
    with start(debug_config=config) as executor:
        assert executor.get_latest_debug_tensors() == []
        results(executor)
        tensors = executor.get_latest_debug_tensors()
        assert [set(step.debug_tensors) for step in tensors] == [{"sequence_length", "input_ids"}] * 3
        assert [step.debug_tensors["sequence_length"].tolist() for step in tensors] == [[6], [7], [8]]
        assert [step.debug_tensors["input_ids"].tolist() for step in tensors] == [[token] for token in GREEDY[1:4]]
        assert [step.iter for step in tensors] == [2, 3, 4]
        assert executor.get_latest_debug_tensors() == []


@pytest.mark.long
def test_a_queue_after_its_engine_died() -> None:
    config = trtllm.DebugConfig(debug_tensor_names=["sequence_length"], debug_tensors_max_iterations=9)
    with start(debug_config=config) as executor:
        results(executor)
        os.kill(executor._executor.pids["engine-0"], signal.SIGKILL)
        results(executor, 2)
        # The steps of the first process were removed.
        tensors = executor.get_latest_debug_tensors()
        assert [step.debug_tensors["sequence_length"].tolist() for step in tensors] == [[4], [5]]


@pytest.mark.long
def test_without_a_limit_files_stay(caplog) -> None:
    config = trtllm.DebugConfig(debug_input_tensors=True, debug_output_tensors=True)
    with caplog.at_level(logging.WARNING, "sluice.trtllm"), start(debug_config=config) as executor:
        results(executor)
        assert executor.get_latest_debug_tensors() == []
    written = folder(caplog)
    steps = sorted(written.glob("*/*"))
    assert [step.name for step in steps] == [f"iteration_{i}" for i in range(5)]
    for step, token in zip(steps, GREEDY, strict=True):
        assert {path.stem for path in step.iterdir()} == {*DEBUG_INPUTS, "logits"}
        assert np.load(step / "logits.npy", allow_pickle=False).argmax(-1).tolist() == [token]
    assert np.load(steps[0] / "input_ids.npy", allow_pickle=False).tolist() == PROMPT
    shutil.rmtree(written)


def test_debug_names() -> None:
    assert debug_names(None) == []
    assert debug_names(trtllm.DebugConfig()) == []
    assert debug_names(trtllm.DebugConfig(debug_output_tensors=True, debug_tensor_names=["input_ids"])) == [
        "input_ids",
        "logits",
    ]
    with pytest.raises(trtllm.OptionError, match="debug_tensors_max_iterations is -1, must be at least 0"):
        debug_names(trtllm.DebugConfig(debug_tensors_max_iterations=-1))
