"""Threads that work for tenants in turn."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from router.errors import RequestError
from router.shares import FairShare, SharedSpace, of_tenant
from sluice.wire.errors import ErrorCode

MAX_WAITING = 2048
"""Texts that are queued or in progress. A single tenant may have half of them, as many as the default number of
requests that may wait for admission."""
MAX_WAITING_BYTES = 64 << 20
"""Total size of these texts, which limits the memory that a flood of long prompts can take."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    later: bool
    size: int
    work: Callable[[], Any]
    done: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairThreads:
    """Runs work in a few threads. Used by one event loop.

    The next tenant is the one that has used the threads least (`FairShare`, by seconds). A tenant's prompts come before
    its other work, which is called `later`. One thread is reserved: later work never takes it, and once work names a
    tenant, no tenant takes it besides all others. So a prompt waits for at most one job of anyone else.

    Tenants also share the places and bytes of the queue (`SharedSpace`). Beyond its share, a tenant's work is refused
    with RequestError OVERLOADED.
    """

    def __init__(self, threads: int, weights: Mapping[str, float]) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._num_threads = threads
        self._shares = FairShare(weights)
        self._tenants_named = bool(weights)
        self._queues: dict[tuple[str, bool], deque[_Job]] = {}
        """By (tenant, later): non-empty queues."""
        self._running: list[_Job] = []
        self._places = SharedSpace(MAX_WAITING)
        self._bytes = SharedSpace(MAX_WAITING_BYTES)

    @property
    def unfinished(self) -> int:
        """Number of jobs that wait or run."""
        return self._places.total

    async def run(self, work: Callable[[], T], size: int, tenant: str = "", *, later: bool = False) -> T:
        """`work()`, run in a thread. `size`: bytes of its input. Raises RequestError OVERLOADED.

        If the caller is cancelled, waiting work is dropped. Running work continues, and counts until it ends.
        """
        self._check_room(tenant, later, size)
        job = _Job(tenant, later, size, work)
        self._enter(job)
        self._start()
        try:
            result: T = await job.done
        finally:
            queue = self._queues.get((tenant, later))
            if queue is not None and job in queue:
                queue.remove(job)
                self._forget_empty(job, queue)
                self._leave(job)
        return result

    def close(self) -> None:
        """Stop the threads and drop queued work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_room(self, tenant: str, later: bool, size: int) -> None:
        holder = tenant, later
        whose = of_tenant(tenant)
        if not self._places.has_room(holder, 1):
            message = (
                f"too many texts{whose} are being tokenized or decoded, at most {self._places.limit_of(holder)} may be"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        if not self._bytes.has_room(holder, size):
            message = (
                f"texts{whose} are being tokenized or decoded, and with the {size} bytes of this one they would exceed "
                f"the {self._bytes.limit_of(holder)} bytes that are allowed now"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)

    def _enter(self, job: _Job) -> None:
        holder = job.tenant, job.later
        self._places.take(holder, 1)
        self._bytes.take(holder, job.size)
        self._shares.enter(job.tenant)
        self._tenants_named = self._tenants_named or bool(job.tenant)
        self._queues.setdefault(holder, deque()).append(job)

    def _leave(self, job: _Job) -> None:
        holder = job.tenant, job.later
        self._places.release(holder, 1)
        self._bytes.release(holder, job.size)
        self._shares.leave(job.tenant)

    def _start(self) -> None:
        """Give work to all threads that may take some."""
        while len(self._running) < self._num_threads and (job := self._next()) is not None:
            self._running.append(job)
            began = time.monotonic()
            future = asyncio.wrap_future(self._threads.submit(job.work))
            future.add_done_callback(partial(self._end, job, began))

    def _next(self) -> _Job | None:
        eligible = [holder for holder in self._queues if self._may_start(*holder)]
        if not eligible:
            return None
        # Among tenants with the same use, those with prompts are first.
        eligible.sort(key=lambda holder: holder[1])
        tenant = self._shares.first(holder[0] for holder in eligible)
        queue = self._queues[next(holder for holder in eligible if holder[0] == tenant)]
        job = queue.popleft()
        self._forget_empty(job, queue)
        return job

    def _may_start(self, tenant: str, later: bool) -> bool:
        if len(self._running) < self._num_threads - 1 or self._num_threads == 1:
            return True
        if later and all(job.later for job in self._running):
            return False
        return not self._tenants_named or any(job.tenant != tenant for job in self._running)

    def _end(self, job: _Job, began: float, future: "asyncio.Future[Any]") -> None:
        self._running.remove(job)
        self._shares.charge(job.tenant, time.monotonic() - began)
        self._leave(job)
        if not job.done.done():
            _copy(future, job.done)
        elif not future.cancelled():
            # The caller was cancelled: mark an exception as retrieved.
            future.exception()
        self._start()

    def _forget_empty(self, job: _Job, queue: deque[_Job]) -> None:
        if not queue:
            del self._queues[job.tenant, job.later]


def _copy(future: "asyncio.Future[Any]", result: "asyncio.Future[Any]") -> None:
    if future.cancelled():
        result.cancel()
    elif (error := future.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(future.result())
