"""Failures inside OpenVINO fail the step and mark the device as lost."""

import multiprocessing

import pytest

from engine_worker.lora.paged import PagedStep
from engine_worker.step import DeviceLostError, Slice, Step
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.engine_worker.openvino.loaded import load, load_adapter


def _with_a_length_missing(step):
    inputs = step.passes[0].inputs
    inputs[2] = inputs[2][:1]
    return step


def _run_a_broken_step(folder, raised):
    runner = load(folder)
    runner.run(Step((Slice([1, 2], 0, [0]),)))
    runner.check()
    prepare = runner._forward.prepare
    runner._forward.prepare = lambda arrays: _with_a_length_missing(prepare(arrays))
    for call in (lambda: runner.run(Step((Slice([1, 2], 0, [0]), Slice([3, 4], 0, [1])))), runner.check):
        try:
            call()
        except (RuntimeError, DeviceLostError) as error:
            raised.put((type(error).__name__, str(error)))


def test_a_node_that_throws_fails_the_step_and_the_device(tmp_path):
    """In a separate process, since the failure may damage it. If attention throws, OpenVINO only prints the exception
    and returns the previous step's output."""
    write_checkpoint(tmp_path, CONFIGS["qwen3, tied"])
    context = multiprocessing.get_context("spawn")
    raised = context.SimpleQueue()
    process = context.Process(target=_run_a_broken_step, args=(tmp_path, raised))
    process.start()
    process.join()
    assert not raised.empty()
    kind, text = raised.get()
    assert (kind, text[:34]) == ("RuntimeError", "OpenVINO could not compute this st"), text
    assert not raised.empty()
    kind, text = raised.get()
    assert (kind, text) == ("DeviceLostError", "cpu has failed: OpenVINO is in an undefined state after an error")


class HookedRequest:
    """OpenVINO's infer request that calls a function before it computes."""

    def __init__(self, request, before_infer):
        self._request = request
        self._before_infer = before_infer

    def __getattr__(self, name):
        return getattr(self._request, name)

    def infer(self, **options):
        self._before_infer()
        return self._request.infer(**options)


def _fail():
    raise RuntimeError("a node has failed")


def test_nothing_is_computed_after_a_failure(tmp_path):
    """With overlap the next step is already queued when a step fails."""
    write_checkpoint(tmp_path, CONFIGS["qwen3, tied"])
    runner = load(tmp_path)
    forward, step = runner._forward, Step((Slice([1, 2], 0, [0]),))
    request = forward._request
    forward._request = HookedRequest(request, runner.check)
    # check() may be called while a step runs, since an earlier step may have failed. It must not report a lost device.
    runner.run(step)
    forward._request = HookedRequest(request, _fail)
    with pytest.raises(RuntimeError, match="a node has failed"):
        runner.run(step)
    forward._request = request
    for _ in range(2):
        with pytest.raises(RuntimeError, match="undefined state"):
            runner.run(step)
        with pytest.raises(DeviceLostError, match="undefined state"):
            runner.check()


def test_an_error_in_an_adapters_products_is_reported(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, CONFIGS["qwen3, tied"])
    runner = load(tmp_path, lora=True)
    load_adapter(runner._forward, 1)

    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(PagedStep, "add", fail)
    step = Step((Slice([1, 2], 0, [0], adapter_slot=1),))
    with pytest.raises(RuntimeError, match=r"products of LoRA adapters failed: MemoryError\('no room'\)"):
        runner.run(step)
