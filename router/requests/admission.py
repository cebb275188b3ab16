"""Admission to the ring: permits up to the capacity, then a bounded queue, then immediate refusals."""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from router.errors import RequestError
from router.shares import FairShare
from sluice.settings.router import AdmissionSettings
from sluice.wire.errors import ErrorCode
from sluice.wire.params import place_in_line

PROMPT_COST = 1.0
"""Cost of one computed prompt token, charged to its tenant."""
CACHED_COST = 0.1
"""Cost of one prompt token from the prefix cache."""
OUTPUT_COST = 2.0
"""Cost of one generated token."""


@dataclass(slots=True, eq=False)
class Permit:
    """Permission for one request to be on the ring, charged to its tenant."""

    _admission: "Admission | None"
    """None once the permit has been released."""
    _tenant: str

    def credit_cached(self, tokens: int) -> None:
        """Refund `tokens` prompt tokens that were in the prefix cache: the whole prompt was charged at admission."""
        self._charge((CACHED_COST - PROMPT_COST) * tokens)

    def charge_output(self, tokens: int) -> None:
        self._charge(OUTPUT_COST * tokens)

    def release(self) -> None:
        """Return the permit, so that the next request is admitted. Idempotent."""
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.release(self._tenant)

    def _charge(self, cost: float) -> None:
        if self._admission is not None:
            self._admission.shares.charge(self._tenant, cost)


@dataclass(slots=True, order=True)
class _Waiter:
    place: float
    """Position in the queue, see `place_in_line`."""
    arrival: int
    tenant: str = field(compare=False)
    context_tokens: int = field(compare=False)
    admitted: "asyncio.Future[None]" = field(compare=False)
    removed: bool = field(default=False, compare=False)
    """The waiter was cancelled and is no longer in the queue."""


class Admission:
    """Admits the next request of the tenant that `FairShare` chooses; within a tenant by priority with aging, then by
    arrival.

    Once a request names a tenant, some of the batch slots are reserved for tenants that hold less than their share. So
    a tenant that arrives while another one floods the router need not wait for the flood's requests to end.
    """

    def __init__(self, settings: AdmissionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.live = 0
        """Number of permits held."""
        self.waiting = 0
        """Number of waiting requests."""
        self.waiting_tokens = 0
        """Context tokens of the waiting requests."""
        self.refused = 0
        """Number of refused requests."""
        self.shares = FairShare(settings.tenant_weights)
        self._settings = settings
        self.capacity = settings.max_live
        """Maximum number of permits."""
        self._batch_slots = settings.max_live
        """Number of admitted requests that the engines can run at the same time."""
        self._clock = clock
        self._tenants_named = bool(settings.tenant_weights)
        self._held: Counter[str] = Counter()
        """Permits by tenant."""
        self._queues: dict[str, list[_Waiter]] = {}
        """By tenant: a non-empty heap."""
        self._waiting_of: Counter[str] = Counter()
        """Waiting requests by tenant."""
        self._arrivals = 0

    @property
    def held_by_tenant(self) -> dict[str, int]:
        """Number of permits by tenant."""
        return dict(self._held)

    @property
    def waiting_by_tenant(self) -> dict[str, int]:
        """Number of waiting requests by tenant."""
        return dict(self._waiting_of)

    def resize(self, capacity: int, batch_slots: int | None = None) -> None:
        """Change the number of permits and of requests that can run at the same time.

        If more permits are held than `capacity`, no request is admitted until enough were released.
        """
        self.capacity, self._batch_slots = capacity, min(capacity, batch_slots or capacity)
        self._admit()

    def check(self, tenant: str) -> None:
        """Raises RequestError OVERLOADED if any further request of this tenant would be refused, regardless of size."""
        if not self.waiting and self._has_room(tenant):
            return
        waiting, limit = self._waiting_of[tenant], self._settings.tenant_waiting
        if (self._tenants_named or tenant) and waiting >= limit:
            self._refuse(
                f"{waiting} requests of the tenant {tenant!r} are waiting, at most {limit} may (max_tenant_waiting)"
            )
        limit = self._settings.max_waiting
        if self.waiting >= limit:
            self._refuse(
                f"{self.live} requests are live and {self.waiting} are waiting, at most {limit} may wait (max_waiting)"
            )

    async def acquire(self, priority: int, context_tokens: int, tenant: str = "", *, refusable: bool = True) -> Permit:
        """Wait for a permit. If the caller is cancelled, its request leaves the queue.

        `context_tokens`: number of tokens to compute before the first new one. `refusable`: whether to raise
        RequestError OVERLOADED immediately if the queue is full. False for a paused request, which has released its
        permit for a while.
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

    def release(self, tenant: str) -> None:
        """Take a permit back. Called only by `Permit`."""
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
            # If the permit was granted before this coroutine ran again, nothing else would release it.
            if admitted.done() and not admitted.cancelled():
                self.release(tenant)
            else:
                self._remove(waiter)
            raise

    def _check_tokens(self, context_tokens: int) -> None:
        # An empty queue accepts a prompt of any length; otherwise a long one could never wait.
        if self.waiting and self.waiting_tokens + context_tokens > self._settings.max_waiting_tokens:
            self._refuse(
                f"{self.waiting} requests with {self.waiting_tokens} tokens of prompts and resumed outputs are waiting "
                f"and this one has {context_tokens}, at most {self._settings.max_waiting_tokens} tokens may wait "
                "(max_waiting_tokens)"
            )

    def _refuse(self, message: str) -> None:
        self.refused += 1
        raise RequestError(ErrorCode.OVERLOADED, message)

    def _has_room(self, tenant: str) -> bool:
        """Whether one more request of this tenant may be admitted."""
        if self.live >= self.capacity:
            return False
        if not self._tenants_named:
            # There is no other tenant to reserve slots for.
            return True
        fraction = self._settings.tenant_reserved_fraction
        reserved = max(1, round(fraction * self._batch_slots)) if fraction else 0
        if self.live < self._batch_slots - reserved:
            return True
        present = self.shares.tenants + (0 if self.shares.requests(tenant) else 1)
        # Assume at least two shares: another tenant may arrive at any time.
        return self._held[tenant] < max(1, self._batch_slots // max(2, present))

    def _admit(self) -> None:
        while self._queues:
            eligible = [tenant for tenant in self._queues if self._has_room(tenant)]
            if not eligible:
                return
            tenant = self.shares.first(eligible)
            waiter = heapq.heappop(self._queues[tenant])
            if not self._queues[tenant]:
                del self._queues[tenant]
            self._count(waiter, -1)
            if waiter.admitted.done():
                # Cancelled, but its coroutine has not run yet; `_remove` must not count it twice.
                waiter.removed = True
                self.shares.leave(tenant)
            else:
                self._grant(tenant, waiter.context_tokens)
                waiter.admitted.set_result(None)

    def _grant(self, tenant: str, context_tokens: int) -> None:
        self.live += 1
        self._held[tenant] += 1
        self.shares.charge(tenant, PROMPT_COST * context_tokens)

    def _remove(self, waiter: _Waiter) -> None:
        """Remove a waiter that was cancelled."""
        if waiter.removed:
            return
        waiter.removed = True
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
