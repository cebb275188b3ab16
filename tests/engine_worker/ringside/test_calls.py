"""Calls from routers: which of them run, and when they are answered."""

import pytest
import structlog

from engine_worker.ringside.calls import MAX_PENDING, Calls
from sluice.wire.calls import CallAnswer, EngineCall, MethodCall, RankAnswer
from tests.fakes.runner import ScriptedRunner

EPOCH = 7


@pytest.fixture
def sent() -> list[tuple[str, CallAnswer]]:
    return []


@pytest.fixture
def calls(sent) -> Calls:
    return Calls(ScriptedRunner(4, 4), EPOCH, lambda *answer: sent.append(answer), structlog.get_logger())


def echo(number: int, epoch: int = EPOCH) -> EngineCall:
    return EngineCall(epoch, number, f"mem://router-{number}", MethodCall("echo", f"[{number}]"))


def test_each_router_gets_its_answer_once_all_ranks_have_answered(calls, sent):
    calls.begin(echo(1))
    calls.finish()
    assert not sent
    calls.begin(echo(2))
    assert calls.pending
    calls.finish()
    assert sent == [("mem://router-1", CallAnswer(EPOCH, 1, [RankAnswer(0, "[1]")]))]
    calls.finish()
    assert sent[1:] == [("mem://router-2", CallAnswer(EPOCH, 2, [RankAnswer(0, "[2]")]))]
    assert not calls.pending
    calls.finish()
    assert len(sent) == 2


def test_a_call_for_an_earlier_process_is_dropped(calls, sent):
    calls.begin(echo(1, epoch=6))
    assert not calls.pending
    assert not sent


def test_calls_beyond_the_limit_are_refused(calls, sent):
    for number in range(MAX_PENDING + 1):
        calls.begin(echo(number))
    ((router, answer),) = sent
    assert router == f"mem://router-{MAX_PENDING}"
    assert answer.answers[0].rank is None
    assert f"already running {MAX_PENDING} calls" in answer.answers[0].error
    calls.finish()
    calls.finish()
    assert len(sent) == MAX_PENDING + 1
    assert not calls.pending
