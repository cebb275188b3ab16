"""Method calls on rank 0, with other ranks whose answers the test controls."""

import json
import threading

import pytest

from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from engine_worker.runner.runner import ModelRunner
from engine_worker.step import Slice, Step
from sluice.wire.calls import MethodCall, RankAnswer
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint

STEP = Step((Slice([1, 2], 0, [0], ()),))


class FakeFollowers:
    def __init__(self) -> None:
        self.calls: list[MethodCall] = []
        self.answers: list[RankAnswer] | None = None

    def send_step(self, moves, arrays, processed) -> None:
        pass

    def call(self, call: MethodCall):
        self.calls.append(call)
        return lambda: self.answers


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return load_runner(open_written(folder), RunnerConfig("cpu", kv_cache_tokens=256, threads=1), lambda *_: None)


def test_a_single_rank_answers_immediately(alone):
    (answer,) = alone.call(MethodCall("memory")).poll()
    assert answer.rank == 0
    assert json.loads(answer.value)["kv_blocks"] == alone.num_blocks


def test_ranks_that_do_not_exist(alone):
    answers = alone.call(MethodCall("ping", ranks=(2, 0, 1, 2))).poll()
    assert [answer.rank for answer in answers] == [0, 1, 2]
    assert answers[0].value
    assert answers[1].error == answers[2].error == "this rank does not exist: the engine's last rank is 0"
    assert [answer.rank for answer in alone.call(MethodCall("ping", ranks=(7,))).poll()] == [7]


def test_waits_for_the_other_ranks(alone):
    followers = FakeFollowers()
    runner = ModelRunner(alone._forward, followers=followers)
    pending = runner.call(MethodCall("ping"))
    assert pending.poll() is None
    followers.answers = [RankAnswer(1, "7")]
    assert [answer.rank for answer in pending.poll()] == [0, 1]
    assert followers.calls == [MethodCall("ping")]


def test_with_overlap_a_method_runs_after_earlier_steps(alone, monkeypatch):
    forward, entered, may_continue = alone._forward, threading.Event(), threading.Event()
    runner, logits = ModelRunner(forward, overlap=True), forward.logits

    def slow(*arguments):
        entered.set()
        may_continue.wait(60)
        return logits(*arguments)

    monkeypatch.setattr(forward, "logits", slow)
    step = runner.launch(STEP)
    pending = runner.call(MethodCall("ping"))
    assert entered.wait(60)
    assert pending.poll() is None
    may_continue.set()
    step.collect()
    runner._thread.shutdown()
    (answer,) = pending.poll()
    assert answer.value
