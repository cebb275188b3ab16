"""Traces of ended requests on their way to a collector: a bounded queue and a thread, so that requests never wait for
the collector."""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from structlog.stdlib import BoundLogger

from router.requests.trace import RequestTrace

MAX_QUEUED = 4096
"""Requests in the queue. When it is full, further traces are dropped and counted."""
MAX_BATCH = 32
"""Requests per batch. Building the spans of one request takes 0.1 ms, during which the event loop cannot run."""
BATCH_SECONDS = 0.5
"""Time to wait for more requests to join a batch."""
CLOSE_SECONDS = 3.0
"""Time to send the queued traces at shutdown."""


class Sender(Protocol):
    """Sends traces to a collector."""

    def send(self, traces: Sequence[RequestTrace]) -> bool:
        """Whether the collector has accepted the traces. May block: it is called in the queue's thread."""

    def close(self) -> None:
        """Stop a running `send`. Called from another thread."""


class TraceQueue:
    def __init__(self, sender: Sender, log: BoundLogger, max_queued: int = MAX_QUEUED) -> None:
        self._sender = sender
        self._log = log
        self._queue: queue.Queue[RequestTrace | None] = queue.Queue(max_queued)
        self._rejected = 0
        """Spans dropped because the queue was full. Written by the event loop, the next two counters by the thread."""
        self._failed = 0
        """Spans that the collector did not accept."""
        self.sent = 0
        """Spans that the collector accepted."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of spans that were not sent."""
        return self._rejected + self._failed

    def put(self, trace: RequestTrace) -> None:
        """Queue a trace if it is sampled. Never blocks."""
        if not trace.context.sampled:
            return
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self._rejected += trace.num_spans

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send the queued traces within `seconds`, then close the sender."""
        end = time.monotonic() + seconds
        try:
            self._queue.put(None, timeout=seconds)
            self._thread.join(max(0.0, end - time.monotonic()))
        except queue.Full:
            self._log.warning("spans_dropped", dropped=self.dropped, reason="the collector is too slow")
        self._sender.close()

    def _run(self) -> None:
        failing = False
        while batch := self._next_batch():
            spans = sum(trace.num_spans for trace in batch)
            if self._sender.send(batch):
                self.sent, failing = self.sent + spans, False
                continue
            self._failed += spans
            if not failing:
                # Log once per outage; the metric counts all dropped spans.
                self._log.warning("spans_dropped", dropped=self.dropped, reason="the collector did not accept them")
            failing = True

    def _next_batch(self) -> list[RequestTrace]:
        """The next traces, at least one; empty once the queue is closed."""
        batch: list[RequestTrace] = []
        end: float | None = None
        while len(batch) < MAX_BATCH:
            try:
                trace = self._queue.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if trace is None:
                # Put the end marker back, so that the next call returns an empty batch.
                if batch:
                    self._queue.put(None)
                break
            batch.append(trace)
            end = end or time.monotonic() + BATCH_SECONDS
        return batch
