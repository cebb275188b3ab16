"""A request under which an engine died runs alone: all others go elsewhere, until it has brought some tokens."""

from math import inf

from engine_worker.core.live import LiveRequests
from engine_worker.request import Request
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.wire import PROBATION_TOKENS

HOLD_SECONDS = 0.05
"""Nothing is computed for so long, so that the routers know who it is before it may end this process."""
REFUSAL = Fault(ErrorCode.QUARANTINE.name, "the engine runs a request alone, under which an engine died before")


class Quarantine:
    """Held by at most one request at a time."""

    def __init__(self, live: LiveRequests) -> None:
        self.holder: int | None = None
        """Number of the request, as of the latest look. Any thread may read it."""
        self._live = live
        self._request: Request | None = None
        self._starts_at = -inf

    def look(self) -> int | None:
        """Who holds it now. It ends by itself: with the request, or with its first tokens."""
        request = self._request
        if request is not None:
            here = self._live.requests.get(request.spec.request) is request
            drawn = sum(sequence.num_drawn for sequence in request.sequences)
            if not here or drawn > PROBATION_TOKENS * request.spec.n:
                self._request = None
        self.holder = self._request.spec.request if self._request is not None else None
        return self.holder

    def begin(self, request: Request, now: float) -> None:
        """Hand all others back, and begin this one."""
        for other in list(self._live.requests.values()):
            self._live.end_request(other, FinishReason.ERROR, now, fault=REFUSAL)
        self._live.begin(request, now)
        self._request, self._starts_at = request, now + HOLD_SECONDS
        self.look()

    def holds_back(self, now: float) -> bool:
        """Whether nothing is to be computed yet."""
        return self._request is not None and now < self._starts_at
