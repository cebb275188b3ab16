"""Who may go on the ring now, who waits, and who is told at once that there is no room."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from router.errors import RequestError
from sluice.ring.errors import ErrorCode

HIGHEST_PRIORITY = 3


class Permit:
    """One request's place on the ring."""

    def __init__(self, admission: "Admission") -> None:
        self._admission: Admission | None = admission

    def release(self) -> None:
        """Give it to the next one. Idempotent."""
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.give_back()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    admitted: "asyncio.Future[None]"
    prompt_tokens: int


class Admission:
    """Permits by capacity; beyond it a queue by priority, then arrival, bounded by requests and by prompt tokens."""

    def __init__(self, capacity: int, max_waiting: int, max_waiting_tokens: int) -> None:
        self.live = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self.refused = 0
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._queues: dict[int, OrderedDict[int, _Waiter]] = {
            priority: OrderedDict() for priority in range(HIGHEST_PRIORITY, 0, -1)
        }
        self._arrivals = 0

    @property
    def capacity(self) -> int:
        """Permits; where it shrinks below those given, nobody is admitted until enough came back."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._capacity = capacity
        self._admit()

    async def acquire(self, priority: int, prompt_tokens: int, refusable: bool = True) -> Permit:
        """Wait for a permit; whoever is cancelled meanwhile leaves the queue.

        Raises RequestError OVERLOADED at once when the queue is full, unless it must not be refused: a request that
        gave its permit back for a while.
        """
        if self.live < self._capacity and not self.waiting:
            self.live += 1
            return Permit(self)
        if refusable:
            self._check_room(prompt_tokens)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), prompt_tokens)
        self._arrivals += 1
        arrival = self._arrivals
        self._queues[priority][arrival] = waiter
        self._count(waiter, 1)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if self._queues[priority].pop(arrival, None) is not None:
                self._count(waiter, -1)
            elif waiter.admitted.done() and not waiter.admitted.cancelled():
                self.give_back()
            raise
        return Permit(self)

    def give_back(self) -> None:
        """A permit is free; only `Permit` calls this."""
        self.live -= 1
        self._admit()

    def _check_room(self, prompt_tokens: int) -> None:
        tokens = self.waiting_tokens + prompt_tokens
        # An empty queue takes a prompt of any length: else a long one could never wait.
        if self.waiting >= self._max_waiting or (self.waiting and tokens > self._max_waiting_tokens):
            self.refused += 1
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{self.live} requests are live and {self.waiting} with {self.waiting_tokens} prompt tokens wait; "
                f"at most {self._max_waiting} with {self._max_waiting_tokens} may wait",
            )

    def _admit(self) -> None:
        while self.waiting and self.live < self._capacity:
            queue = next(queue for queue in self._queues.values() if queue)
            _, waiter = queue.popitem(last=False)
            self._count(waiter, -1)
            if not waiter.admitted.done():
                self.live += 1
                waiter.admitted.set_result(None)

    def _count(self, waiter: _Waiter, by: int) -> None:
        self.waiting += by
        self.waiting_tokens += by * waiter.prompt_tokens
