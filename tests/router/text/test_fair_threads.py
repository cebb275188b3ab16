"""Threads that tokenize: order, shares of tenants, the reserved thread, limits."""

import asyncio
import threading
import time

import pytest

from router.errors import RequestError
from router.shares import SharedSpace
from router.text.fair_threads import FairThreads


class Blocked:
    """Work that runs until it is released, and records the order."""

    def __init__(self, threads: FairThreads) -> None:
        self.order: list[str] = []
        self._threads = threads
        self._release = threading.Semaphore(0)
        self.jobs: list[asyncio.Task[None]] = []

    def submit(self, name: str, tenant: str, later: bool = False) -> None:
        self.jobs.append(asyncio.ensure_future(self._threads.run(lambda: self._work(name), 1, tenant, later=later)))

    async def finish(self) -> list[str]:
        await asyncio.sleep(0)
        self._release.release(len(self.jobs))
        await asyncio.gather(*self.jobs)
        return self.order

    def _work(self, name: str) -> None:
        self.order.append(name)
        self._release.acquire(timeout=60)
        # Otherwise the clock may not advance within a job, and its tenant would not be charged.
        time.sleep(0.001)


async def test_tenants_take_turns_and_prompts_come_first():
    blocked = Blocked(FairThreads(1, {}))
    blocked.submit("a0", "a")
    for i in range(1, 4):
        blocked.submit(f"a{i}", "a", later=True)
    blocked.submit("a4", "a")
    blocked.submit("b0", "b", later=True)
    blocked.submit("b1", "b")
    blocked.submit("c0", "c")
    order = await blocked.finish()
    # a0 runs at once. Prompts of tenants that have used nothing are next, then the tenants in turn.
    assert set(order[1:3]) == {"b1", "c0"}
    assert order.index("a4") < order.index("a1") < order.index("a2") < order.index("a3")
    assert order.index("b0") < order.index("a2")


@pytest.mark.parametrize(("flood", "newcomer"), [("prompts", "another"), ("later", "hostile")])
async def test_a_flood_leaves_a_thread_to_others(flood, newcomer):
    threads = FairThreads(2, {})
    release = threading.Event()
    jobs = [
        asyncio.ensure_future(threads.run(lambda: release.wait(60), 1, "hostile", later=flood == "later"))
        for _ in range(50)
    ]
    await asyncio.sleep(0.01)
    # Runs while the first job of the flood still does.
    prompt = threads.run(lambda: "done", 1, newcomer)
    if newcomer == "hostile":
        # Without any other tenant the reserved thread is not for this one either, but its prompt is next.
        release.set()
    assert await asyncio.wait_for(prompt, 30) == "done"
    release.set()
    await asyncio.gather(*jobs)


async def test_a_single_tenant_uses_all_threads_for_prompts():
    threads = FairThreads(2, {})
    both = threading.Barrier(2)
    await asyncio.gather(*(threads.run(lambda: both.wait(60), 1) for _ in range(2)))


async def test_cancelled_work_that_waits_is_dropped():
    blocked = Blocked(threads := FairThreads(1, {}))
    blocked.submit("first", "a")
    blocked.submit("second", "a")
    await asyncio.sleep(0)
    dropped = blocked.jobs.pop()
    dropped.cancel()
    await asyncio.gather(dropped, return_exceptions=True)
    assert threads.unfinished == 1
    assert await blocked.finish() == ["first"]
    assert not threads.unfinished


async def test_errors_reach_the_caller():
    def fail():
        raise ValueError("no")

    threads = FairThreads(1, {})
    with pytest.raises(ValueError, match="no"):
        await threads.run(fail, 1)
    assert not threads.unfinished


async def test_a_flood_of_one_tenant_is_refused_while_another_finds_room(monkeypatch):
    monkeypatch.setattr("router.text.fair_threads.MAX_WAITING", 8)
    monkeypatch.setattr("router.text.fair_threads.MAX_WAITING_BYTES", 8)
    blocked = Blocked(threads := FairThreads(1, {}))
    for i in range(4):
        blocked.submit(str(i), "hostile", later=True)
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="of the tenant 'hostile'"):
        await threads.run(lambda: None, 1, "hostile", later=True)
    # The same tenant's prompts have room of their own, and so has another tenant.
    blocked.submit("prompt", "hostile")
    blocked.submit("honest", "honest")
    assert set(await blocked.finish()) == {"0", "1", "2", "3", "prompt", "honest"}


def test_each_newcomer_finds_room():
    space = SharedSpace(1024)
    taken = []
    for holder in range(6):
        count = 0
        while space.has_room(holder, 1):
            space.take(holder, 1)
            count += 1
        taken.append(count)
    assert taken == [512, 256, 128, 64, 32, 16]
    space.release(0, 512)
    assert space.has_room(5, 200)
    assert space.total == sum(taken) - 512
