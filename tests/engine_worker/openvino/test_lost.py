"""A node of OpenVINO that throws: in a process of its own, which it may damage."""

import multiprocessing

from engine_worker.step import DeviceLostError, Slice, Step
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.engine_worker.openvino.loaded import load


def _without_a_length(step):
    step.inputs[2] = step.inputs[2][:1]
    return step


def _break(folder, raised):
    runner = load(folder)
    runner.run(Step((Slice([1, 2], 0, [0]),)))
    runner.check()
    prepare = runner._forward.prepare
    runner._forward.prepare = lambda arrays: _without_a_length(prepare(arrays))
    for act in (lambda: runner.run(Step((Slice([1, 2], 0, [0]), Slice([3, 4], 0, [1])))), runner.check):
        try:
            act()
        except (RuntimeError, DeviceLostError) as error:
            raised.put((type(error).__name__, str(error)))


def test_a_node_that_throws_fails_the_step_and_the_device(tmp_path):
    """Inside of attention OpenVINO only prints the exception, and returns what it computed last."""
    write_checkpoint(tmp_path, CONFIGS["qwen3, tied"])
    context = multiprocessing.get_context("spawn")
    raised = context.SimpleQueue()
    process = context.Process(target=_break, args=(tmp_path, raised))
    process.start()
    process.join()
    assert not raised.empty()
    kind, text = raised.get()
    assert (kind, text[:34]) == ("RuntimeError", "OpenVINO could not compute this st"), text
    assert not raised.empty()
    kind, text = raised.get()
    assert (kind, text) == ("DeviceLostError", "cpu has failed: OpenVINO is in an undefined state after an error")
