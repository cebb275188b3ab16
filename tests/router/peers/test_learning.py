"""How long a newly started router waits for reports of an adapter, with a manual clock."""

import asyncio
from dataclasses import dataclass

import pytest
import structlog

from router.errors import RequestError
from router.peers import learning
from router.peers.learning import LEARN_SECONDS, Learning
from sluice.ring.errors import ErrorCode

LOG = structlog.wrap_logger(structlog.PrintLogger())


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Scene:
    learning: Learning
    clock: Clock
    known: bool = False

    async def ask(self) -> "asyncio.Task[None]":
        """A request that names the adapter x; returns once it waits or has ended."""
        task = asyncio.ensure_future(self.learning.wait("x", lambda: self.known))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    def move(self, seconds: float) -> None:
        """Advance the clock and wake waiting requests, like their timers would."""
        self.clock.now += seconds
        self.learning.on_change()


def scene(**configured: str) -> Scene:
    clock = Clock()
    return Scene(Learning(configured, LOG, clock), clock)


async def ended(task: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(60):
        await task


async def refused(task: "asyncio.Task[None]") -> ErrorCode:
    with pytest.raises(RequestError) as found:
        await ended(task)
    return found.value.code


async def test_a_known_adapter_is_not_waited_for():
    told = scene()
    told.known = True
    assert (await told.ask()).done()


async def test_a_request_waits_until_the_adapter_is_known():
    told = scene()
    task = await told.ask()
    told.learning.on_heartbeat()
    told.move(0.9 * LEARN_SECONDS)
    await asyncio.sleep(0)
    assert not task.done()
    told.known = True
    told.learning.on_change()
    await ended(task)


async def test_a_request_waits_while_engines_have_more_to_report():
    """A heartbeat carries a limited number of adapters."""
    told = scene()
    task = await told.ask()
    for _ in range(5):
        told.learning.on_heartbeat(more=True)
        told.move(0.9 * LEARN_SECONDS)
        await asyncio.sleep(0)
        assert not task.done()
    told.learning.on_heartbeat()
    told.move(0.2 * LEARN_SECONDS)
    await ended(task)
    # Later reports are new changes, not part of what this router still has to learn.
    told.learning.on_heartbeat(more=True)
    assert (await told.ask()).done()


async def test_a_request_waits_until_the_ring_had_time_to_report_the_adapter():
    told = scene()
    told.move(0.9 * LEARN_SECONDS)
    told.learning.on_heartbeat()
    task = await told.ask()
    # Later heartbeats have no effect.
    told.move(0.5 * LEARN_SECONDS)
    told.learning.on_heartbeat()
    await asyncio.sleep(0)
    assert not task.done()
    told.move(0.5 * LEARN_SECONDS)
    await ended(task)
    assert (await told.ask()).done()


async def test_without_an_engine_it_is_not_certain_that_the_adapter_is_unknown():
    told = scene()
    told.move(10 * LEARN_SECONDS)
    task = await told.ask()
    assert not task.done()
    told.move(LEARN_SECONDS)
    assert await refused(task) is ErrorCode.NO_ENGINE


async def test_requests_wait_for_a_configured_adapter_until_its_load_was_attempted():
    told = scene(x="/x", y="/y")
    told.learning.on_heartbeat()
    told.move(LEARN_SECONDS)
    task = await told.ask()
    assert not task.done()
    loaded = []

    async def load(adapter_id: str, path: str) -> None:
        loaded.append((adapter_id, path))
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "no such folder")

    await told.learning.load_configured(lambda adapter_id: adapter_id == "y", load)
    assert loaded == [("x", "/x")]
    await ended(task)


async def test_a_configured_adapter_that_is_not_loaded_in_time():
    told = scene(x="/x")
    told.learning.on_heartbeat()
    told.move(LEARN_SECONDS)
    task = await told.ask()
    told.move(LEARN_SECONDS)
    assert await refused(task) is ErrorCode.NO_ENGINE


async def test_a_configured_adapter_is_loaded_again_after_its_engines_died(monkeypatch):
    monkeypatch.setattr(learning, "RETRY_SECONDS", 0.0)
    told = scene(x="/x")
    task, errors = await told.ask(), [ErrorCode.ENGINE_LOST, ErrorCode.NO_ENGINE]

    async def load(*_: str) -> None:
        if errors:
            raise RequestError(errors.pop(), "lost")
        told.known = True

    await told.learning.load_configured(lambda _: told.known, load)
    await ended(task)


async def test_the_number_of_waiting_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(learning, "MAX_WAITING", 2)
    told = scene()
    tasks = [await told.ask() for _ in range(3)]
    assert await refused(tasks[2]) is ErrorCode.OVERLOADED
    told.known = True
    told.learning.on_change()
    for task in tasks[:2]:
        await ended(task)
    told.known = False
    task = await told.ask()
    assert not task.done()
    task.cancel()
