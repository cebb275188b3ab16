"""Counts and times of this router's requests, for the metrics."""

import time
from collections import Counter

from router.requests.request_state import RequestState
from sluice.telemetry.histogram import Histogram

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class RequestCounters:
    """Since the start of the process. The event loop counts; the thread of a scrape reads."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """Ended requests, by outcome and gRPC status."""
        self.recoveries: Counter[str] = Counter()
        """Attempts that were given up for another one, by error code."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.request_seconds = Histogram(SECONDS)
        self.queue_seconds = Histogram(SECONDS)
        """From arrival to the first submit."""
        self.first_token_seconds = Histogram(SECONDS)
        """From arrival to the first token."""
        self.inter_token_seconds = Histogram(TOKEN_SECONDS)
        """Between two tokens of a sequence; tokens that come together share the time."""

    def on_tokens(self, request: RequestState, index: int, count: int) -> None:
        """`count` tokens of one sequence came over the ring. A unary call's come at its end: see `on_ended`."""
        if not request.spec.streaming:
            return
        now, sequence = time.monotonic(), request.log.sequences[index]
        if sequence.last_at is not None:
            self.inter_token_seconds.observe((now - sequence.last_at) / count, count)
        # The first token of the request; the first of its other sequences is between no two tokens, and counts nowhere.
        elif all(other.last_at is None for other in request.log.sequences):
            self.first_token_seconds.observe(now - request.arrived)
        sequence.last_at = now

    def on_refused(self, outcome: str, status: str) -> None:
        """A request was refused before it was taken in."""
        self.requests[outcome, status] += 1

    def on_ended(self, request: RequestState, outcome: str, status: str) -> None:
        """The answer to a request has ended."""
        self.requests[outcome, status] += 1
        self.request_seconds.observe(time.monotonic() - request.arrived)
        if not request.spec.streaming:
            self._count_unary(request)
        if request.submitted is not None:
            self.queue_seconds.observe(request.submitted - request.arrived)
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += request.log.started.cached_tokens if request.log.started else 0
        self.completion_tokens += request.log.received

    def _count_unary(self, request: RequestState) -> None:
        """By the engine's own times: the detokenizer sends nothing before the end."""
        if request.first_token_seconds is not None:
            self.first_token_seconds.observe(request.first_token_seconds)
        for sequence in request.log.sequences:
            if sequence.end is not None and sequence.received > 1:
                gaps = sequence.received - 1
                self.inter_token_seconds.observe(sequence.end.times.generation / gaps, gaps)
