"""Sends requests at their time and waits for their ends."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from sluice.loadgen.outcome import Outcome
from sluice.loadgen.target import Target
from sluice.loadgen.workload import Request


@dataclass(frozen=True, slots=True)
class Pace:
    rate: float | None = None
    """Requests per second, as a Poisson process; None: all at once."""
    concurrency: int | None = None
    """Most requests in flight; None: any number."""

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the start, scaled so that the last request comes at count / rate: else the rate of a short run
        would depend on the seed."""
        if self.rate is None or not count:
            return [0.0] * count
        draw, moments = random.Random(seed), [0.0]
        for _ in range(count):
            moments.append(moments[-1] + draw.expovariate(self.rate))
        return [moment * count / self.rate / moments[-1] for moment in moments[1:]]


@dataclass(frozen=True, slots=True)
class Measured:
    outcomes: Sequence[Outcome]
    """In the order of the requests."""
    seconds: float
    """From the first moment to the end of the last request."""

    @classmethod
    def joined(cls, rounds: "Sequence[Measured]") -> Self:
        """Of one server, with other work between the rounds."""
        return cls([outcome for each in rounds for outcome in each.outcomes], sum(each.seconds for each in rounds))


async def run_load(
    target: Target, requests: Sequence[Request], pace: Pace, seed: int, on_end: Callable[[Outcome], None]
) -> Measured:
    loop = asyncio.get_running_loop()
    places = None if pace.concurrency is None else asyncio.Semaphore(pace.concurrency)
    began = loop.time()

    async def send(request: Request, at: float) -> Outcome:
        await asyncio.sleep(began + at - loop.time())
        due = loop.time()
        if places is not None:
            await places.acquire()
        try:
            outcome = Outcome(loop.time(), queued=loop.time() - due)
            await target.send(request, outcome)
            outcome.end = loop.time()
        finally:
            if places is not None:
                places.release()
        on_end(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        arrivals = pace.arrivals(len(requests), seed)
        tasks = [group.create_task(send(each, at)) for each, at in zip(requests, arrivals, strict=True)]
    return Measured([task.result() for task in tasks], loop.time() - began)


async def send_one(target: Target, request: Request) -> Outcome:
    loop = asyncio.get_running_loop()
    outcome = Outcome(loop.time())
    await target.send(request, outcome)
    outcome.end = loop.time()
    return outcome
