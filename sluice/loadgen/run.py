"""Sends requests at their scheduled times and waits until all have ended."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from sluice.loadgen.target import Outcome, Target
from sluice.loadgen.workload import Request


@dataclass(frozen=True, slots=True)
class Pace:
    rate: float | None = None
    """Requests per second, as a Poisson process; None: all requests are sent immediately."""
    concurrency: int | None = None
    """Limit on requests in flight; None: no limit."""

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Times of the requests in seconds from the start. They are scaled so that the last request is sent at
        count / rate: otherwise the rate of a short run would depend on the seed."""
        if self.rate is None or not count:
            return [0.0] * count
        rng = random.Random(seed)
        times = list(accumulate(rng.expovariate(self.rate) for _ in range(count)))
        return [time * count / self.rate / times[-1] for time in times]


@dataclass(frozen=True, slots=True)
class Measured:
    outcomes: Sequence[Outcome]
    """In the order of the requests."""
    seconds: float
    """Time from the start of the run to the end of the last request."""

    @classmethod
    def joined(cls, rounds: "Sequence[Measured]") -> Self:
        """Several rounds of one server; the time between them does not count."""
        outcomes = [outcome for measured in rounds for outcome in measured.outcomes]
        return cls(outcomes, sum(measured.seconds for measured in rounds))


async def run_load(
    target: Target, requests: Sequence[Request], pace: Pace, seed: int, on_end: Callable[[Outcome], None]
) -> Measured:
    """Send each request at its time, as far as the limit on concurrency permits. `on_end` is called at each request's
    end."""
    loop = asyncio.get_running_loop()
    slots = None if pace.concurrency is None else asyncio.Semaphore(pace.concurrency)
    start = loop.time()

    async def send(request: Request, arrival: float) -> Outcome:
        await asyncio.sleep(start + arrival - loop.time())
        due = loop.time()
        if slots is not None:
            await slots.acquire()
        try:
            outcome = Outcome(loop.time(), queued=loop.time() - due)
            await target.send(request, outcome)
            outcome.end = loop.time()
        finally:
            if slots is not None:
                slots.release()
        on_end(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        arrivals = pace.arrivals(len(requests), seed)
        tasks = [group.create_task(send(request, arrival)) for request, arrival in zip(requests, arrivals, strict=True)]
    return Measured([task.result() for task in tasks], loop.time() - start)


async def send_one(target: Target, request: Request) -> Outcome:
    loop = asyncio.get_running_loop()
    outcome = Outcome(loop.time())
    await target.send(request, outcome)
    outcome.end = loop.time()
    return outcome
