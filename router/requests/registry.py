"""All requests in this router: by their id, while their answer is open; by their number, while they are on the ring."""

import asyncio
import secrets
from collections import Counter

from router.errors import RequestError
from router.requests.request_phase import RequestPhase
from router.requests.request_state import Attempt, RequestState
from router.validate.spec import Spec
from sluice.ring.errors import ErrorCode


class Requests:
    """A request is open until its answer ends, and on the ring from a submit to the last terminal row of that attempt.

    Neither implies the other: a client may go while its attempt is being cancelled.
    """

    def __init__(self, max_open: int, max_tenant_open: int | None = None) -> None:
        """`max_tenant_open` of one tenant; None: unlimited."""
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()
        self._max_open = max_open
        self._max_tenant_open = max_tenant_open
        self._closed = False
        self._by_id: dict[str, RequestState] = {}
        self._open: dict[RequestState, None] = {}
        """In order of arrival, in which they recover when an engine is lost."""
        self._open_by_tenant: Counter[str] = Counter()
        self._on_ring: dict[int, RequestState] = {}

    @property
    def closed(self) -> bool:
        """No new requests are taken: the router is draining."""
        return self._closed

    @property
    def open(self) -> list[RequestState]:
        return list(self._open)

    @property
    def on_ring(self) -> list[RequestState]:
        return list(self._on_ring.values())

    def close(self) -> None:
        """Irreversible."""
        self._closed = True

    def add(self, spec: Spec, tenant: str = "") -> RequestState:
        """A new request. Raises RequestError DUPLICATE_REQUEST where an open one has its id, DRAINING when closed.

        OVERLOADED where too many are open, in all or of this tenant. No other limit counts requests whose clients
        do not read their answers.
        """
        if self._closed:
            raise RequestError(ErrorCode.DRAINING, "the router is draining")
        if spec.request_id in self._by_id:
            raise RequestError(
                ErrorCode.DUPLICATE_REQUEST,
                f"a request with the id {spec.request_id!r} is live",
                metadata={"request_id": spec.request_id},
            )
        self._check_room(tenant)
        request = RequestState(self._new_number(), spec, tenant)
        self._by_id[spec.request_id] = request
        self._open[request] = None
        self._open_by_tenant[tenant] += 1
        self.idle.clear()
        return request

    def find(self, request_id: str) -> RequestState | None:
        """The open request with this id, unless it was aborted."""
        return self._by_id.get(request_id)

    def numbered(self, number: int) -> RequestState | None:
        """The request with this number, where it is on the ring."""
        return self._on_ring.get(number)

    def free_id(self, request: RequestState) -> None:
        """Allow another request to take its id."""
        if self._by_id.get(request.spec.request_id) is request:
            del self._by_id[request.spec.request_id]

    def remove(self, request: RequestState) -> None:
        """Its answer has ended."""
        self.free_id(request)
        del self._open[request]
        self._open_by_tenant[request.tenant] -= 1
        if not self._open_by_tenant[request.tenant]:
            del self._open_by_tenant[request.tenant]
        if not self._open:
            self.idle.set()

    def enter_ring(self, request: RequestState, attempt: Attempt) -> None:
        """An attempt was submitted."""
        request.on_submitted(attempt)
        self._on_ring[request.number] = request

    def leave_ring(self, request: RequestState, phase: RequestPhase) -> None:
        """Rows of its attempt are not awaited any more."""
        request.move_to(phase)
        del self._on_ring[request.number]

    def _check_room(self, tenant: str) -> None:
        if len(self._open) >= self._max_open:
            raise RequestError(
                ErrorCode.OVERLOADED, f"{len(self._open)} requests are open, at most {self._max_open} may be"
            )
        count = self._open_by_tenant[tenant]
        if self._max_tenant_open is not None and count >= self._max_tenant_open:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{count} requests of the tenant {tenant!r} are open, at most {self._max_tenant_open} may be",
            )

    def _new_number(self) -> int:
        # Random, for engines serve several routers and may still hold requests of one that was restarted.
        while (number := secrets.randbits(63)) in self._on_ring:
            pass
        return number
