"""The requests in this router, from the front door to their last terminal: by the caller's id and by ring number."""

import asyncio
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field

from router.errors import RequestError
from router.peers.peers import DetokenizerPeer, EnginePeer
from router.peers.placement import Choice
from router.requests.admission import Permit
from router.requests.suspects import Suspicion
from router.requests.token_log import RequestLog
from router.validate.spec import Spec
from sluice.ring.errors import ErrorCode
from sluice.ring.params import RetentionParams
from sluice.ring.wire import PROBATION_TOKENS


@dataclass(frozen=True, slots=True)
class Route:
    """Where an attempt went."""

    engine: EnginePeer
    detokenizer: DetokenizerPeer
    choice: Choice


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. The front door owns it until its answer ends, the dispatcher until its last terminal."""

    number: int
    spec: Spec
    log: RequestLog
    tenant: str = ""
    """Whose it is; empty: nobody's in particular."""
    arrived: float = field(default_factory=lambda: time.monotonic())
    attempt: int = 0
    """Number of the one on the ring, or of the next."""
    attempts: int = 0
    """Submitted so far."""
    prompt: list[int] = field(default_factory=list)
    retention: RetentionParams = field(default_factory=RetentionParams)
    permit: Permit | None = None
    route: Route | None = None
    """Set while it is on the ring."""
    max_tokens: int = 0
    """Settled by the first submit."""
    submitted: float | None = None
    """When its first attempt was."""
    resubmitted: float = 0.0
    """When its latest attempt was."""
    first_heard: float | None = None
    """When the first tokens came over the ring."""
    first_delta: float | None = None
    engine: str | None = None
    detokenizer: str | None = None
    model: str = ""
    """Fingerprint of the model of its latest attempt; before the first, of the model of its `resume` tokens."""
    begun: bool = False
    """The first token of this attempt has come."""
    received: int = 0
    """Tokens that attempts before this one brought."""
    fruitless: int = 0
    """Attempts in a row that brought no token."""
    avoided: set[int] = field(default_factory=set)
    """Epochs of peers at which those failed: others come first."""
    suspicion: Suspicion = field(default_factory=Suspicion)
    aborted: bool = False
    cancelled: bool = False
    """A cancel for all of this attempt is on its way to the engine."""
    ended: set[int] = field(default_factory=set)
    """Sequences whose terminal has come over the ring, in this attempt or one before."""
    queue: asyncio.Timeout | None = None
    """Open while it waits for admission and for the ring; bounded by its time limit."""

    @property
    def bound(self) -> bool:
        """It can go on with `model` only: its caller was told of that model, or tokens of it have come."""
        return bool(self.model) and (
            bool(self.spec.resume_model or self.ended) or self.log.start_told or self.log.received > 0
        )

    @property
    def first_token(self) -> float | None:
        """Seconds from its arrival to its first delta; without deltas, to its first token as the engine tells."""
        if self.first_delta is not None:
            return self.first_delta - self.arrived
        times = [log.end.times for log in self.log.sequences if log.end and log.received]
        if self.submitted is None or not times:
            return None
        return self.submitted - self.arrived + min(found.queue + found.context for found in times)

    @property
    def interval(self) -> int:
        """Tokens per row of this attempt: where engines died under it, its progress has to be seen."""
        return 1 if self.suspicion.touched else self.spec.text.interval

    @property
    def progressed(self) -> bool:
        """This attempt got further than the one before it, and not only by its lost rows.

        Where rows are joined its start has to do.
        """
        if self.log.received - self.received > PROBATION_TOKENS * self.spec.n + self.suspicion.unseen:
            return True
        return self.interval > 1 and self.suspicion.started

    @property
    def unseen(self) -> int:
        """Tokens that this attempt may have had beyond those that came, where rows are joined."""
        return self.interval * self.spec.n if self.interval > 1 and self.suspicion.started else 0

    def give_permit_back(self) -> None:
        """Its place on the ring is free; idempotent."""
        if self.permit is not None:
            self.permit.release()
            self.permit = None


class Requests:
    """The table of them."""

    def __init__(self, max_open: int, max_tenant_open: int | None = None) -> None:
        """`max_tenant_open` of one tenant; None: any number."""
        self._max_open = max_open
        self._max_tenant_open = max_tenant_open
        self.closed = False
        """No new ones: draining."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._by_id: dict[str, RequestState] = {}
        self._open: dict[RequestState, None] = {}
        """In order of arrival: so they move when an engine goes."""
        self._open_of: Counter[str] = Counter()
        """By tenant."""
        self._on_ring: dict[int, RequestState] = {}

    @property
    def open(self) -> list[RequestState]:
        """Those whose answer has not ended."""
        return list(self._open)

    @property
    def on_ring(self) -> list[RequestState]:
        """Those with an attempt on the ring, and terminals of it still to come."""
        return list(self._on_ring.values())

    def enter(self, spec: Spec, tenant: str = "") -> RequestState:
        """A new one. Raises RequestError DUPLICATE_REQUEST while another live one has its id, DRAINING when closed.

        OVERLOADED when too many are open, of all or of this tenant: those whose clients do not read their answers count
        here and nowhere else.
        """
        if self.closed:
            raise RequestError(ErrorCode.DRAINING, "the router is draining")
        if spec.request_id in self._by_id:
            raise RequestError(
                ErrorCode.DUPLICATE_REQUEST,
                f"a request with the id {spec.request_id!r} is live",
                metadata={"request_id": spec.request_id},
            )
        if len(self._open) >= self._max_open:
            raise RequestError(
                ErrorCode.OVERLOADED, f"{len(self._open)} requests are open, at most {self._max_open} may be"
            )
        here = self._open_of[tenant]
        if self._max_tenant_open is not None and here >= self._max_tenant_open:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{here} requests of the tenant {tenant!r} are open, at most {self._max_tenant_open} may be",
            )
        live = RequestState(self._new_number(), spec, RequestLog(spec.n), tenant, model=spec.resume_model)
        live.suspicion.deaths = spec.engine_deaths
        for index, ids in spec.resume.items():
            live.log.bring(index, ids)
        self._by_id[spec.request_id] = live
        self._open[live] = None
        self._open_of[tenant] += 1
        self.idle.clear()
        return live

    def find(self, request_id: str) -> RequestState | None:
        """The live one with this id that was not aborted."""
        return self._by_id.get(request_id)

    def numbered(self, number: int) -> RequestState | None:
        """One on the ring."""
        return self._on_ring.get(number)

    def free_id(self, live: RequestState) -> None:
        """Another one may have its id now."""
        if self._by_id.get(live.spec.request_id) is live:
            del self._by_id[live.spec.request_id]

    def leave(self, live: RequestState) -> None:
        """Its answer has ended."""
        self.free_id(live)
        del self._open[live]
        self._open_of[live.tenant] -= 1
        if not self._open_of[live.tenant]:
            del self._open_of[live.tenant]
        if not self._open:
            self.idle.set()

    def put_on_ring(self, live: RequestState, route: Route) -> None:
        """An attempt was submitted."""
        live.route = route
        live.attempts += 1
        live.resubmitted = time.monotonic()
        if live.submitted is None:
            live.submitted = live.resubmitted
        live.engine, live.detokenizer = route.engine.name, route.detokenizer.name
        if route.engine.heartbeat is not None:
            live.model = route.engine.heartbeat.fingerprint
        self._on_ring[live.number] = live

    def take_off_ring(self, live: RequestState) -> None:
        """Nothing more will come of this attempt."""
        self._on_ring.pop(live.number, None)
        live.route = None

    def _new_number(self) -> int:
        while (number := secrets.randbits(63)) in self._on_ring:
            pass
        return number
