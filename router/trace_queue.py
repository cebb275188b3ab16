"""Ended requests on their way to a collector: a bounded queue and a thread, so that no request waits for either."""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from structlog.stdlib import BoundLogger

from router.requests.trace import RequestTrace

MAX_QUEUED = 4096
"""Requests; further ones are dropped, and counted."""
MAX_BATCH = 32
"""Building the spans of a request takes 0.1 ms, which blocks the event loop."""
BATCH_SECONDS = 0.5
"""For more requests to join a batch."""
CLOSE_SECONDS = 3.0


class Sender(Protocol):
    """May block: it runs in the queue's thread."""

    def send(self, traces: Sequence[RequestTrace]) -> bool:
        """Whether the collector has them."""

    def close(self) -> None:
        """Ends a `send` that runs; called by another thread."""


class TraceQueue:
    def __init__(self, sender: Sender, log: BoundLogger, max_queued: int = MAX_QUEUED) -> None:
        self._sender = sender
        self._log = log
        self._queue: queue.Queue[RequestTrace | None] = queue.Queue(max_queued)
        self._rejected = 0
        """Spans for which there was no room; written by the event loop, the next two by the thread."""
        self._failed = 0
        self.sent = 0
        """Spans."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans."""
        return self._rejected + self._failed

    def put(self, trace: RequestTrace) -> None:
        """Never blocks."""
        if not trace.context.sampled:
            return
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self._rejected += trace.num_spans

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what is queued, within this time."""
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
                # Once per outage: the metric counts them.
                self._log.warning("spans_dropped", dropped=self.dropped, reason="the collector did not accept them")
            failing = True

    def _next_batch(self) -> list[RequestTrace]:
        """At least one; none at the end."""
        batch: list[RequestTrace] = []
        end: float | None = None
        while len(batch) < MAX_BATCH:
            try:
                trace = self._queue.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if trace is None:
                # Seen again by the next call, which then has nothing before it.
                if batch:
                    self._queue.put(None)
                break
            batch.append(trace)
            end = end or time.monotonic() + BATCH_SECONDS
        return batch
