"""Who may go on the ring now, who waits, and who is told at once that there is no room."""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from router.errors import RequestError
from router.requests.fair_share import CACHED_COST, OUTPUT_COST, PROMPT_COST, FairShare
from sluice.ring.errors import ErrorCode
from sluice.ring.params import place_in_line
from sluice.settings.router import AdmissionSettings


class Permit:
    """One request's place on the ring, and its tenant's bill."""

    def __init__(self, admission: "Admission", tenant: str) -> None:
        self._admission: Admission | None = admission
        self._tenant = tenant

    def found_cached(self, tokens: int) -> None:
        """So much of the prompt need not be computed after all."""
        self._charge((CACHED_COST - PROMPT_COST) * tokens)

    def drew(self, tokens: int) -> None:
        """So many tokens of output came."""
        self._charge(OUTPUT_COST * tokens)

    def release(self) -> None:
        """Give it to the next one. Idempotent."""
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.give_back(self._tenant)

    def _charge(self, cost: float) -> None:
        if self._admission is not None:
            self._admission.shares.charge(self._tenant, cost)


@dataclass(slots=True, order=True)
class _Waiter:
    place: float
    """In line: see `place_in_line`."""
    arrival: int
    tenant: str = field(compare=False)
    context_tokens: int = field(compare=False)
    admitted: "asyncio.Future[None]" = field(compare=False)
    gone: bool = field(default=False, compare=False)
    """Its turn came when it had been cancelled already."""


class Admission:
    """Permits by capacity; beyond it a bounded queue.

    The next is of the tenant that had the least service (`FairShare`); within a tenant by priority with ageing, then
    arrival. Once tenants are named, of the `places` where requests run at once a part is kept for tenants that hold
    less than their share: so one that comes into a flood need not wait for the flood's requests to end.
    """

    def __init__(self, settings: AdmissionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.live = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self.refused = 0
        self.shares = FairShare(settings.tenant_weights)
        self._settings = settings
        self._capacity = self._places = settings.max_live
        self._clock = clock
        self._named = bool(settings.tenant_weights)
        """Tenants have been named."""
        self._held: Counter[str] = Counter()
        """Permits by tenant."""
        self._queues: dict[str, list[_Waiter]] = {}
        """By tenant, heaps that are not empty."""
        self._waiting_of: Counter[str] = Counter()
        self._arrivals = 0

    @property
    def capacity(self) -> int:
        """Permits."""
        return self._capacity

    def resize(self, capacity: int, places: int | None = None) -> None:
        """Permits, and of those the requests that can run at once. Where there are fewer than were given, nobody is
        admitted until enough came back.
        """
        self._capacity, self._places = capacity, min(capacity, places or capacity)
        self._admit()

    def check(self, tenant: str) -> None:
        """Raises RequestError OVERLOADED where one more request of this tenant would be refused, whatever it is."""
        if not self.waiting and self._room(tenant):
            return
        waiting, most = self._waiting_of[tenant], self._settings.tenant_waiting
        if (self._named or tenant) and waiting >= most:
            self._refuse(f"{waiting} requests of the tenant {tenant!r} wait; at most {most} may")
        most = self._settings.max_waiting
        if self.waiting >= most:
            self._refuse(f"{self.live} requests are live and {self.waiting} wait; at most {most} may wait")

    async def acquire(self, priority: int, context_tokens: int, tenant: str = "", *, refusable: bool = True) -> Permit:
        """Wait for a permit; a caller cancelled meanwhile leaves the queue. `context_tokens` have to be computed
        before the first new one.

        Raises RequestError OVERLOADED at once when the queue is full, unless it must not be refused: a request that
        gave its permit back for a while.
        """
        if refusable:
            self.check(tenant)
        self._named = self._named or bool(tenant)
        if self.waiting or not self._room(tenant):
            await self._wait(priority, context_tokens, tenant, refusable)
        else:
            self.shares.enter(tenant)
            self._give(tenant, context_tokens)
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
            if admitted.done() and not admitted.cancelled():
                self.give_back(tenant)
            else:
                self._forget(waiter)
            raise

    def _check_tokens(self, context_tokens: int) -> None:
        # An empty queue takes a prompt of any length: else a long one could never wait.
        if self.waiting and self.waiting_tokens + context_tokens > self._settings.max_waiting_tokens:
            self._refuse(
                f"{self.waiting} requests with {self.waiting_tokens} tokens of prompts and resumed outputs wait and "
                f"this one has {context_tokens}; at most {self._settings.max_waiting_tokens} may wait"
            )

    def _refuse(self, message: str) -> None:
        self.refused += 1
        raise RequestError(ErrorCode.OVERLOADED, message)

    def _room(self, tenant: str) -> bool:
        """For one more request of this tenant."""
        if self.live >= self._capacity:
            return False
        if not self._named:
            return True
        fraction = self._settings.tenant_reserved_fraction
        reserved = max(1, round(fraction * self._places)) if fraction else 0
        if self.live < self._places - reserved:
            return True
        present = self.shares.tenants + (0 if self.shares.requests(tenant) else 1)
        # Somebody else may always come.
        return self._held[tenant] < max(1, self._places // max(2, present))

    def _admit(self) -> None:
        while self._queues:
            able = [tenant for tenant in self._queues if self._room(tenant)]
            if not able:
                return
            tenant = self.shares.first(able)
            waiter = heapq.heappop(self._queues[tenant])
            if not self._queues[tenant]:
                del self._queues[tenant]
            self._count(waiter, -1)
            if waiter.admitted.done():
                waiter.gone = True
                self.shares.leave(tenant)
            else:
                self._give(tenant, waiter.context_tokens)
                waiter.admitted.set_result(None)

    def _give(self, tenant: str, context_tokens: int) -> None:
        self.live += 1
        self._held[tenant] += 1
        self.shares.charge(tenant, PROMPT_COST * context_tokens)

    def _forget(self, waiter: _Waiter) -> None:
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
