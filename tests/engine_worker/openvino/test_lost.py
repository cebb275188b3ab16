"""What becomes of an engine when OpenVINO fails."""

import multiprocessing

import pytest

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
    """In a process of its own, which it may damage. Inside of attention OpenVINO only prints the exception, and returns
    what it computed last."""
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


class Request:
    """OpenVINO's, with something to do before it computes."""

    def __init__(self, request, before):
        self._request = request
        self._before = before

    def __getattr__(self, name):
        return getattr(self._request, name)

    def infer(self, **options):
        self._before()
        return self._request.infer(**options)


def _fail():
    raise RuntimeError("a node has failed")


def test_nothing_is_computed_after_a_failure(tmp_path):
    """With overlap the next step is queued by then."""
    write_checkpoint(tmp_path, CONFIGS["qwen3, tied"])
    runner = load(tmp_path)
    forward, step = runner._forward, Step((Slice([1, 2], 0, [0]),))
    request = forward._request
    forward._request = Request(request, runner.check)
    # A check beside a step that runs: another may have failed for a reason of its own.
    runner.run(step)
    forward._request = Request(request, _fail)
    with pytest.raises(RuntimeError, match="a node has failed"):
        runner.run(step)
    forward._request = request
    for _ in range(2):
        with pytest.raises(RuntimeError, match="undefined state"):
            runner.run(step)
        with pytest.raises(DeviceLostError, match="undefined state"):
            runner.check()
