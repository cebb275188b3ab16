"""Traces for a slow or lost collector: requests never wait for it, and dropped spans are counted."""

import threading

import pytest
import structlog

from router.requests.trace import RequestTrace, Span
from router.requests.trace_context import new_context
from router.trace_queue import TraceQueue
from tests.fakes.processes import wait_until

SECONDS = 60.0

LOG = structlog.wrap_logger(structlog.PrintLogger())


class FakeSender:
    def __init__(self) -> None:
        self.batches: list[list[RequestTrace]] = []
        self.works = True
        self.may_continue = threading.Event()
        self.may_continue.set()
        self.sending = threading.Event()
        self.closed = False

    def send(self, traces) -> bool:
        self.sending.set()
        self.may_continue.wait()
        self.batches.append(list(traces))
        return self.works

    def close(self) -> None:
        self.closed = True
        self.may_continue.set()


@pytest.fixture
def sender():
    return FakeSender()


def trace(children: int = 4) -> RequestTrace:
    span = Span("a", 1.0, 2.0)
    return RequestTrace(new_context(), span, (span,) * children)


def test_batches_arrive_in_order(sender):
    queue = TraceQueue(sender, LOG)
    traces = [trace() for _ in range(600)]
    for sent_trace in traces:
        queue.put(sent_trace)
    queue.close(SECONDS)
    assert [sent_trace for batch in sender.batches for sent_trace in batch] == traces
    assert (queue.sent, queue.dropped) == (3000, 0)


def test_a_stuck_collector_delays_no_request(sender):
    sender.may_continue.clear()
    traces = TraceQueue(sender, LOG, max_queued=10)
    traces.put(trace())
    assert sender.sending.wait(60)
    for _ in range(110):
        traces.put(trace())
    assert traces.dropped == 5 * 100
    sender.may_continue.set()
    traces.close(SECONDS)
    assert traces.sent == 5 * 11


def test_spans_that_the_collector_does_not_accept_are_counted(sender):
    sender.works = False
    traces = TraceQueue(sender, LOG)
    traces.put(trace(1))
    assert wait_until(lambda: traces.dropped == 2)
    sender.works = True
    traces.put(trace(1))
    assert wait_until(lambda: traces.sent == 2)
    traces.close()


def test_close_waits_only_for_a_limited_time(sender):
    sender.may_continue.clear()
    traces = TraceQueue(sender, LOG, max_queued=2)
    for _ in range(4):
        traces.put(trace())
    traces.close(0.2)
    assert sender.closed
