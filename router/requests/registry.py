"""All requests in this router: by id while their response is open, by number while they are on the ring. Also the
counters."""

import asyncio
import secrets
import time
from collections import Counter, deque

from router.errors import RequestError
from router.parse.spec import Spec
from router.requests.attempt import Attempt
from router.requests.part import Part
from router.requests.request_state import RequestPhase, RequestState
from router.requests.trace_context import TraceContext
from router.shares import SharedSpace, of_tenant
from sluice.telemetry.measures import Histogram
from sluice.telemetry.status_report import RequestReport
from sluice.wire.errors import ErrorCode
from sluice.wire.tables import SharedTables, Table

MAX_REMEMBERED = 64
"""Ended requests that are still listed in status reports."""
MAX_OPEN_TABLE_BYTES = 512 << 20
"""Limit for all prompt tables and images that open requests contain, which are kept for later attempts; a single tenant
may have half of it. Also the limit for tables of prompt adapters, each of which counts once."""


class Requests:
    """A request is open until its response ends, and on the ring from a submission to the attempt's last terminal row.

    Neither implies the other: a client may disconnect while its attempt is being cancelled.
    """

    def __init__(self, max_open: int, max_tenant_open: int | None = None) -> None:
        """`max_tenant_open`: limit for the open requests of one tenant; None for unlimited."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._max_open = max_open
        self._max_tenant_open = max_tenant_open
        self.closed = False
        """No new requests are accepted: the router is draining."""
        self._own_bytes = SharedSpace(MAX_OPEN_TABLE_BYTES)
        """By tenant: bytes of prompt tables and images that open requests themselves contain, not counting prompt
        adapters that they name."""
        self._shared_tables: SharedTables[Table] = SharedTables()
        self._by_id: dict[tuple[str, str], RequestState] = {}
        """By tenant and request id: each tenant has its own ids, so that none can block or probe those of another."""
        self._open: dict[RequestState, None] = {}
        """In order of arrival, which is also the order in which they recover when an engine is lost."""
        self._open_by_tenant: Counter[str] = Counter()
        self._on_ring: dict[int, RequestState] = {}

    @property
    def open(self) -> list[RequestState]:
        return list(self._open)

    @property
    def open_by_tenant(self) -> dict[str, int]:
        return dict(self._open_by_tenant)

    @property
    def on_ring(self) -> list[RequestState]:
        return list(self._on_ring.values())

    def close(self) -> None:
        """Accept no new requests. Irreversible."""
        self.closed = True

    async def wait_idle(self, seconds: float) -> bool:
        """Whether all requests have ended within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def add(
        self, spec: Spec, tenant: str = "", trace: TraceContext | None = None, parts: tuple[Part, ...] = ()
    ) -> RequestState:
        """Register a new request. Raises RequestError: DRAINING, DUPLICATE_REQUEST if an open request of this tenant
        has the same id, or OVERLOADED."""
        if self.closed:
            raise RequestError(ErrorCode.DRAINING, "the router is draining")
        if (tenant, spec.request_id) in self._by_id:
            message = f"a request with the id {spec.request_id!r} is live"
            raise RequestError(ErrorCode.DUPLICATE_REQUEST, message, metadata={"request_id": spec.request_id})
        self._check_room(tenant)
        request = RequestState(self._new_number(), spec, tenant, trace, parts)
        if parts:
            self._take_tables(request)
        self._by_id[tenant, spec.request_id] = request
        self._open[request] = None
        self._open_by_tenant[tenant] += 1
        self._idle.clear()
        return request

    def find(self, request_id: str, tenant: str) -> RequestState | None:
        """The tenant's open request with this id, unless it was aborted."""
        return self._by_id.get((tenant, request_id))

    def find_all(self, request_id: str) -> list[RequestState]:
        """The open requests of all tenants with this id, unless they were aborted."""
        return [request for (_, name), request in self._by_id.items() if name == request_id]

    def numbered(self, number: int) -> RequestState | None:
        """The request with this number, if it is on the ring."""
        return self._on_ring.get(number)

    def free_id(self, request: RequestState) -> None:
        """Allow another request to use the same id."""
        key = request.tenant, request.spec.request_id
        if self._by_id.get(key) is request:
            del self._by_id[key]

    def remove(self, request: RequestState) -> None:
        """Remove a request whose response has ended."""
        self.free_id(request)
        del self._open[request]
        if request.parts:
            self._own_bytes.release(request.tenant, request.own_bytes)
            self._shared_tables.release(request.shared_tables)
        self._open_by_tenant[request.tenant] -= 1
        if not self._open_by_tenant[request.tenant]:
            del self._open_by_tenant[request.tenant]
        if not self._open:
            self._idle.set()

    def enter_ring(self, request: RequestState, attempt: Attempt) -> None:
        request.on_submitted(attempt)
        self._on_ring[request.number] = request

    def leave_ring(self, request: RequestState, phase: RequestPhase) -> None:
        request.move_to(phase)
        del self._on_ring[request.number]

    def _check_room(self, tenant: str) -> None:
        # No other limit covers requests whose clients do not read their responses.
        if len(self._open) >= self._max_open:
            message = f"{len(self._open)} requests are open, at most {self._max_open} may be open"
            raise RequestError(ErrorCode.OVERLOADED, message)
        count, limit = self._open_by_tenant[tenant], self._max_tenant_open
        if limit is not None and count >= limit:
            message = f"{count} requests of the tenant {tenant!r} are open, at most {limit} may be open"
            raise RequestError(ErrorCode.OVERLOADED, message)

    def _take_tables(self, request: RequestState) -> None:
        tenant, own_bytes, tables = request.tenant, request.own_bytes, request.shared_tables
        if own_bytes and not self._own_bytes.has_room(tenant, own_bytes):
            whose = of_tenant(tenant)
            message = (
                f"with the {own_bytes} bytes of this request, prompt tables and images of open requests{whose} "
                f"would exceed the {self._own_bytes.limit_of(tenant)} bytes that are allowed now"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        size = self._shared_tables.num_bytes_with(tables)
        if tables and size > MAX_OPEN_TABLE_BYTES:
            message = (
                f"the prompt adapters of open requests would have {size} bytes, "
                f"at most {MAX_OPEN_TABLE_BYTES} are allowed"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        self._own_bytes.take(tenant, own_bytes)
        self._shared_tables.take(tables)

    def _new_number(self) -> int:
        # Random, because engines serve several routers and may still hold requests of a router that was restarted.
        while (number := secrets.randbits(63)) in self._on_ring:
            pass
        return number


SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class RequestCounters:
    """Counters since the start of the process. Written by the event loop, read from the scrape's thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """Ended requests, by outcome and gRPC status."""
        self.recoveries: Counter[str] = Counter()
        """Attempts that were given up and followed by another one, by error code."""
        self.handovers: Counter[str] = Counter()
        """Attempts at engines of the prefill phase that were to hand over, by outcome; docs/metrics.md lists them."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.request_seconds = Histogram(SECONDS)
        self.queue_seconds = Histogram(SECONDS)
        self.first_token_seconds = Histogram(SECONDS)
        self.inter_token_seconds = Histogram(TOKEN_SECONDS)
        """Time between two tokens of a sequence; tokens that arrive together share the time."""
        self.latest: deque[RequestReport] = deque(maxlen=MAX_REMEMBERED)
        """Ended requests, except refused ones; newest last."""

    def on_tokens(self, request: RequestState, index: int, count: int) -> None:
        """`count` tokens of one sequence have arrived. Unary requests are counted by `on_ended`."""
        if not request.spec.streaming:
            return
        now, sequence = time.monotonic(), request.log.sequences[index]
        if sequence.last_at is not None:
            self.inter_token_seconds.observe((now - sequence.last_at) / count, count)
        # Only the request's first token counts here. The first tokens of its other sequences are not counted anywhere.
        elif all(other.last_at is None for other in request.log.sequences):
            self.first_token_seconds.observe(now - request.arrived)
        sequence.last_at = now

    def on_refused(self, outcome: str, status: str) -> None:
        self.requests[outcome, status] += 1

    def on_ended(self, request: RequestState, outcome: str, status: str) -> None:
        self.requests[outcome, status] += 1
        self.request_seconds.observe(time.monotonic() - request.arrived)
        if not request.spec.streaming:
            self._count_unary(request)
        if request.submitted is not None:
            self.queue_seconds.observe(request.submitted - request.arrived)
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += request.log.started.cached_tokens if request.log.started else 0
        self.completion_tokens += request.log.received
        self.latest.append(report_of(request, outcome))

    def _count_unary(self, request: RequestState) -> None:
        """Use the engine's times, because the detokenizer sends nothing before the end of a unary request."""
        if request.first_token_seconds is not None:
            self.first_token_seconds.observe(request.first_token_seconds)
        for sequence in request.log.sequences:
            if sequence.end is not None and sequence.received > 1:
                gaps = sequence.received - 1
                self.inter_token_seconds.observe(sequence.end.times.generation / gaps, gaps)


def report_of(request: RequestState, outcome: str | None = None) -> RequestReport:
    """`outcome`: given if the request has ended. May be called from any thread."""
    # Read once, because the event loop may reset it.
    started = request.log.started
    return RequestReport(
        id=request.spec.request_id,
        tenant=request.tenant,
        state=request.phase.name if outcome is None else outcome,
        open=outcome is None,
        seconds=time.monotonic() - request.arrived,
        prompt_tokens=len(request.prompt),
        cached_tokens=started.cached_tokens if started else 0,
        completion_tokens=request.log.received,
        attempts=request.attempts,
        engine=request.engine,
        detokenizer=request.detokenizer,
        first_token_seconds=request.first_token_seconds,
    )
