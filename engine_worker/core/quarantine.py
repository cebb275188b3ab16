"""Quarantine: a request under which an engine died runs alone."""

from math import inf

from engine_worker.core.live import LiveRequests
from engine_worker.request import Request
from sluice.wire.errors import ErrorCode, Fault, FinishReason
from sluice.wire.requests import PROBATION_TOKENS

HOLD_SECONDS = 0.05
"""Delay before a quarantined request is computed, so that a heartbeat that names it is sent before it may end this
process."""
QUARANTINED = Fault(ErrorCode.QUARANTINE.name, "the engine is running a suspect request alone, after an engine died")


class Quarantine:
    """Lets a suspect request run alone until it ends or has sampled enough tokens (PROBATION_TOKENS)."""

    def __init__(self, live: LiveRequests) -> None:
        self.holder: int | None = None
        """Number of the request, as of the last `refresh`. May be read from any thread."""
        self._live = live
        self._request: Request | None = None
        self._starts_at = -inf

    def refresh(self) -> int | None:
        """End the quarantine if its request has ended or passed probation; returns the current holder."""
        request = self._request
        if request is not None:
            # Identity, not number: a later attempt may be live under the same number.
            is_live = self._live.requests.get(request.submit.request) is request
            drawn = sum(sequence.num_drawn for sequence in request.sequences)
            if not is_live or drawn > PROBATION_TOKENS * request.submit.n:
                self._request = None
        self.holder = self._request.submit.request if self._request is not None else None
        return self.holder

    def begin(self, request: Request, now: float, *, held: bool = False) -> None:
        """End all other requests with QUARANTINED, so that their routers retry them elsewhere, and begin this one.
        `held`: see `LiveRequests.begin`."""
        for other in list(self._live.requests.values()):
            self._live.end_request(other, FinishReason.ERROR, now, fault=QUARANTINED)
        self._live.begin(request, now, held=held)
        self._request, self._starts_at = request, now + HOLD_SECONDS
        self.refresh()

    def is_holding(self, now: float) -> bool:
        """Whether steps must wait until the quarantined request may be computed."""
        return self._request is not None and now < self._starts_at
