"""What a router counts of its requests."""

import time
from collections import Counter

from router.requests.registry import RequestState
from sluice.telemetry.histogram import Histogram

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class RequestCounters:
    """Since the start; the event loop counts, another thread may read."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """Ended ones, by outcome and gRPC status."""
        self.recoveries: Counter[str] = Counter()
        """Attempts that were given up for another one, by error code."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.request_seconds = Histogram(SECONDS)
        self.queue_seconds = Histogram(SECONDS)
        """Until the submit, of those that came so far."""
        self.first_token_seconds = Histogram(SECONDS)
        """From the arrival of a request to its first token."""
        self.inter_token_seconds = Histogram(TOKEN_SECONDS)
        """Between the tokens of a sequence; those that come together share the time."""

    def heard(self, live: RequestState, sequence: int, count: int) -> None:
        """So many tokens of a sequence came from the ring. Those of a unary call come at its end: see `ended`."""
        if not live.spec.streaming:
            return
        now, log = time.monotonic(), live.log.sequences[sequence]
        if log.heard_at is not None:
            self.inter_token_seconds.observe((now - log.heard_at) / count, count)
        elif all(other.heard_at is None for other in live.log.sequences):
            self.first_token_seconds.observe(now - live.arrived)
        log.heard_at = now

    def refused(self, outcome: str, status: str) -> None:
        """A request was not taken in."""
        self.requests[outcome, status] += 1

    def ended(self, live: RequestState, outcome: str, status: str) -> None:
        """The answer to a request has ended."""
        self.requests[outcome, status] += 1
        self.request_seconds.observe(time.monotonic() - live.arrived)
        if not live.spec.streaming:
            self._unary(live)
        if live.submitted is not None:
            self.queue_seconds.observe(live.submitted - live.arrived)
        self.prompt_tokens += len(live.prompt)
        self.cached_tokens += live.log.started.cached_tokens if live.log.started else 0
        self.completion_tokens += live.log.received

    def _unary(self, live: RequestState) -> None:
        """The engine's own times: nothing came before the end."""
        if live.first_token is not None:
            self.first_token_seconds.observe(live.first_token)
        for log in live.log.sequences:
            if log.end is not None and log.received > 1:
                self.inter_token_seconds.observe(log.end.times.generation / (log.received - 1), log.received - 1)
