"""Admission to the ring: permits by capacity, a bounded queue beyond it, refusals at once beyond that."""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from router.errors import RequestError
from sluice.ring.errors import ErrorCode
from sluice.ring.params import place_in_line
from sluice.settings.router import AdmissionSettings

PROMPT_COST = 1.0
"""To a tenant's share, of a prompt token that is computed."""
CACHED_COST = 0.1
"""Of a prompt token from the prefix cache."""
OUTPUT_COST = 2.0
"""Of a generated token."""


@dataclass(slots=True, eq=False)
class Permit:
    """One request's place on the ring, charged to its tenant."""

    _admission: "Admission | None"
    """None once it is released."""
    _tenant: str

    def credit_cached(self, tokens: int) -> None:
        """So many prompt tokens were found in the prefix cache, after the whole prompt was charged."""
        self._charge((CACHED_COST - PROMPT_COST) * tokens)

    def charge_output(self, tokens: int) -> None:
        self._charge(OUTPUT_COST * tokens)

    def release(self) -> None:
        """Pass it to the next request. Idempotent."""
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.give_back(self._tenant)

    def _charge(self, cost: float) -> None:
        if self._admission is not None:
            self._admission.shares.charge(self._tenant, cost)


class FairShare:
    """Which tenant is next: the one that was served the least, for its weight, in tokens that really were computed.

    Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant is present
    while it has a request here, waiting or live. One that returns starts at the least-served present tenant's count, so
    absence earns nothing; what it was served beyond that is remembered while any tenant is present.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """A tenant of weight 2 gets twice the service of one of weight 1, which is the default."""
        self._weights = dict(weights)
        self._served: dict[str, float] = {}
        """Cost over weight, of the present tenants and of absent ones that were served more than these."""
        self._present: Counter[str] = Counter()
        """Requests by tenant."""

    @property
    def tenants(self) -> int:
        """Number of present tenants."""
        return len(self._present)

    def requests(self, tenant: str) -> int:
        return self._present[tenant]

    def enter(self, tenant: str) -> None:
        if tenant not in self._present:
            floor = min((self._served[other] for other in self._present), default=0.0)
            # Absent tenants at or below the floor would start at the floor anyway: forget them.
            behind = [other for other, served in self._served.items() if other not in self._present and served <= floor]
            for other in behind:
                del self._served[other]
            self._served[tenant] = max(floor, self._served.get(tenant, 0.0))
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
        if not self._present:
            self._served.clear()

    def charge(self, tenant: str, cost: float) -> None:
        self._served[tenant] += cost / self._weights.get(tenant, 1.0)

    def first(self, tenants: Iterable[str]) -> str:
        """The next of these tenants, which are present."""
        return min(tenants, key=self._served.__getitem__)


@dataclass(slots=True, order=True)
class _Waiter:
    place: float
    """In the queue: see `place_in_line`."""
    arrival: int
    tenant: str = field(compare=False)
    context_tokens: int = field(compare=False)
    admitted: "asyncio.Future[None]" = field(compare=False)
    gone: bool = field(default=False, compare=False)
    """Its turn came after it had been cancelled."""


class Admission:
    """The next request is of the tenant that is first by `FairShare`; within a tenant by priority with aging, then
    arrival.

    Once tenants are named, a part of the `places` for requests that run at once is reserved for tenants that hold less
    than their share: so one that arrives in a flood need not wait for the flood's requests to end.
    """

    def __init__(self, settings: AdmissionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.live = 0
        """Permits held."""
        self.waiting = 0
        self.waiting_tokens = 0
        self.refused = 0
        self.shares = FairShare(settings.tenant_weights)
        self._settings = settings
        self.capacity = self._places = settings.max_live
        """Permits that may be held; and how many of these requests can run at once."""
        self._clock = clock
        self._tenants_named = bool(settings.tenant_weights)
        self._held: Counter[str] = Counter()
        """Permits by tenant."""
        self._queues: dict[str, list[_Waiter]] = {}
        """Heaps by tenant, none of them empty."""
        self._waiting_of: Counter[str] = Counter()
        self._arrivals = 0

    @property
    def held_by_tenant(self) -> dict[str, int]:
        """Permits."""
        return dict(self._held)

    @property
    def waiting_by_tenant(self) -> dict[str, int]:
        return dict(self._waiting_of)

    def resize(self, capacity: int, places: int | None = None) -> None:
        """Change the number of permits, and of requests that can run at once.

        Below the number of permits held, no request is admitted until enough were released.
        """
        self.capacity, self._places = capacity, min(capacity, places or capacity)
        self._admit()

    def check(self, tenant: str) -> None:
        """Raises RequestError OVERLOADED if any further request of this tenant would be refused, whatever its size."""
        if not self.waiting and self._has_room(tenant):
            return
        waiting, most = self._waiting_of[tenant], self._settings.tenant_waiting
        if (self._tenants_named or tenant) and waiting >= most:
            self._refuse(f"{waiting} requests of the tenant {tenant!r} wait; at most {most} may (max_tenant_waiting)")
        most = self._settings.max_waiting
        if self.waiting >= most:
            self._refuse(
                f"{self.live} requests are live and {self.waiting} wait; at most {most} may wait (max_waiting)"
            )

    async def acquire(self, priority: int, context_tokens: int, tenant: str = "", *, refusable: bool = True) -> Permit:
        """Wait for a permit; cancelling the caller takes it off the queue. `context_tokens` have to be computed before
        the first new one.

        Raises RequestError OVERLOADED at once if the queue is full. A paused request, which gave its permit back
        for a while, is not `refusable`.
        """
        if refusable:
            self.check(tenant)
        self._tenants_named = self._tenants_named or bool(tenant)
        if self.waiting or not self._has_room(tenant):
            await self._wait(priority, context_tokens, tenant, refusable)
        else:
            self.shares.enter(tenant)
            self._grant(tenant, context_tokens)
        return Permit(self, tenant)

    def give_back(self, tenant: str) -> None:
        """A permit is free; only `Permit` calls this."""
        self.live -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self.shares.leave(tenant)
        self._admit()

    async def _wait(self, priority: int, context_tokens: int, tenant: str, refusable: bool) -> None:
        if refusable:
            self._check_tokens(context_tokens)
        self._arrivals += 1
        place = place_in_line(priority, self._clock(), self._settings.priority_aging_seconds)
        admitted = asyncio.get_running_loop().create_future()
        waiter = _Waiter(place, self._arrivals, tenant, context_tokens, admitted)
        heapq.heappush(self._queues.setdefault(tenant, []), waiter)
        self._count(waiter, 1)
        self.shares.enter(tenant)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            # Cancelled after the permit was granted, but before this coroutine ran again: no other code returns it.
            if admitted.done() and not admitted.cancelled():
                self.give_back(tenant)
            else:
                self._remove(waiter)
            raise

    def _check_tokens(self, context_tokens: int) -> None:
        # An empty queue takes a prompt of any length: else a long one could never wait.
        if self.waiting and self.waiting_tokens + context_tokens > self._settings.max_waiting_tokens:
            self._refuse(
                f"{self.waiting} requests with {self.waiting_tokens} tokens of prompts and resumed outputs wait and "
                f"this one has {context_tokens}; at most {self._settings.max_waiting_tokens} tokens may wait "
                "(max_waiting_tokens)"
            )

    def _refuse(self, message: str) -> None:
        self.refused += 1
        raise RequestError(ErrorCode.OVERLOADED, message)

    def _has_room(self, tenant: str) -> bool:
        """For one more request of this tenant."""
        if self.live >= self.capacity:
            return False
        if not self._tenants_named:
            # There is no other tenant to reserve places for.
            return True
        fraction = self._settings.tenant_reserved_fraction
        reserved = max(1, round(fraction * self._places)) if fraction else 0
        if self.live < self._places - reserved:
            return True
        present = self.shares.tenants + (0 if self.shares.requests(tenant) else 1)
        # At least two shares: another tenant may arrive at any time.
        return self._held[tenant] < max(1, self._places // max(2, present))

    def _admit(self) -> None:
        while self._queues:
            able = [tenant for tenant in self._queues if self._has_room(tenant)]
            if not able:
                return
            tenant = self.shares.first(able)
            waiter = heapq.heappop(self._queues[tenant])
            if not self._queues[tenant]:
                del self._queues[tenant]
            self._count(waiter, -1)
            if waiter.admitted.done():
                # Cancelled, but its coroutine has not run yet; `_remove` must not count it off twice.
                waiter.gone = True
                self.shares.leave(tenant)
            else:
                self._grant(tenant, waiter.context_tokens)
                waiter.admitted.set_result(None)

    def _grant(self, tenant: str, context_tokens: int) -> None:
        self.live += 1
        self._held[tenant] += 1
        self.shares.charge(tenant, PROMPT_COST * context_tokens)

    def _remove(self, waiter: _Waiter) -> None:
        """It was cancelled while it waited."""
        if waiter.gone:
            return
        waiter.gone = True
        self._count(waiter, -1)
        self.shares.leave(waiter.tenant)
        queue = self._queues[waiter.tenant]
        queue.remove(waiter)
        heapq.heapify(queue)
        if not queue:
            del self._queues[waiter.tenant]

    def _count(self, waiter: _Waiter, by: int) -> None:
        self.waiting += by
        self.waiting_tokens += by * waiter.context_tokens
        self._waiting_of[waiter.tenant] += by
        if not self._waiting_of[waiter.tenant]:
            del self._waiting_of[waiter.tenant]
