"""How long a newly started router waits for reports of an adapter, with a manual clock."""

import asyncio
from dataclasses import dataclass

import pytest
import structlog

from router.errors import RequestError
from router.peers import learning
from router.peers.learning import LEARN_SECONDS, Learning
from sluice.wire.errors import ErrorCode

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

    async def begin_wait(self, tenant: str = "") -> "asyncio.Task[None]":
        """A request that names the adapter x; returns once it waits or has ended."""
        task = asyncio.ensure_future(self.learning.wait("x", lambda: self.known, tenant))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    def advance(self, seconds: float) -> None:
        """Advance the clock and wake waiting requests, like their timers would."""
        self.clock.now += seconds
        self.learning.on_change()


def make_scene(**configured: str) -> Scene:
    clock = Clock()
    return Scene(Learning(configured, LOG, clock), clock)


async def ended(task: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(60):
        await task


async def refusal(task: "asyncio.Task[None]") -> RequestError:
    with pytest.raises(RequestError) as raised:
        await ended(task)
    return raised.value


async def refused(task: "asyncio.Task[None]") -> ErrorCode:
    return (await refusal(task)).code


async def test_a_known_adapter_is_not_waited_for():
    scene = make_scene()
    scene.known = True
    assert (await scene.begin_wait()).done()


async def test_a_request_waits_until_the_adapter_is_known():
    scene = make_scene()
    task = await scene.begin_wait()
    scene.learning.on_heartbeat()
    scene.advance(0.9 * LEARN_SECONDS)
    await asyncio.sleep(0)
    assert not task.done()
    scene.known = True
    scene.learning.on_change()
    await ended(task)


async def test_a_request_waits_while_engines_have_more_to_report():
    """A heartbeat carries a limited number of adapters."""
    scene = make_scene()
    task = await scene.begin_wait()
    for _ in range(5):
        scene.learning.on_heartbeat(more=True)
        scene.advance(0.9 * LEARN_SECONDS)
        await asyncio.sleep(0)
        assert not task.done()
    scene.learning.on_heartbeat()
    scene.advance(0.2 * LEARN_SECONDS)
    await ended(task)
    # Later reports are new changes, not part of what this router still has to learn.
    scene.learning.on_heartbeat(more=True)
    assert (await scene.begin_wait()).done()


async def test_a_request_waits_until_the_ring_had_time_to_report_the_adapter():
    scene = make_scene()
    scene.advance(0.9 * LEARN_SECONDS)
    scene.learning.on_heartbeat()
    task = await scene.begin_wait()
    # Later heartbeats have no effect.
    scene.advance(0.5 * LEARN_SECONDS)
    scene.learning.on_heartbeat()
    await asyncio.sleep(0)
    assert not task.done()
    scene.advance(0.5 * LEARN_SECONDS)
    await ended(task)
    assert (await scene.begin_wait()).done()


async def test_without_an_engine_it_is_not_certain_that_the_adapter_is_unknown():
    scene = make_scene()
    scene.advance(10 * LEARN_SECONDS)
    task = await scene.begin_wait()
    assert not task.done()
    scene.advance(LEARN_SECONDS)
    assert await refused(task) is ErrorCode.NO_ENGINE


async def test_requests_wait_for_a_configured_adapter_until_its_load_was_attempted():
    scene = make_scene(x="/x", y="/y")
    scene.learning.on_heartbeat()
    scene.advance(LEARN_SECONDS)
    task = await scene.begin_wait()
    assert not task.done()
    loaded = []

    async def load(adapter_id: str, path: str) -> None:
        loaded.append((adapter_id, path))
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "no such folder")

    await scene.learning.load_configured(lambda adapter_id: adapter_id == "y", load)
    assert loaded == [("x", "/x")]
    await ended(task)


async def test_a_configured_adapter_that_is_not_loaded_in_time():
    scene = make_scene(x="/x")
    scene.learning.on_heartbeat()
    scene.advance(LEARN_SECONDS)
    task = await scene.begin_wait()
    scene.advance(LEARN_SECONDS)
    assert await refused(task) is ErrorCode.NO_ENGINE


async def test_a_configured_adapter_is_loaded_again_after_its_engines_died(monkeypatch):
    monkeypatch.setattr(learning, "RETRY_SECONDS", 0.0)
    scene = make_scene(x="/x")
    task, errors = await scene.begin_wait(), [ErrorCode.ENGINE_LOST, ErrorCode.NO_ENGINE]

    async def load(*_: str) -> None:
        if errors:
            raise RequestError(errors.pop(), "lost")
        scene.known = True

    await scene.learning.load_configured(lambda _: scene.known, load)
    await ended(task)


async def test_the_number_of_waiting_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(learning, "MAX_WAITING", 4)
    scene = make_scene()
    tasks = [await scene.begin_wait() for _ in range(3)]
    assert await refused(tasks[2]) is ErrorCode.OVERLOADED
    scene.known = True
    scene.learning.on_change()
    for task in tasks[:2]:
        await ended(task)
    scene.known = False
    task = await scene.begin_wait()
    assert not task.done()
    task.cancel()


async def test_waiting_requests_of_a_tenant_leave_room_for_others(monkeypatch):
    monkeypatch.setattr(learning, "MAX_WAITING", 8)
    scene = make_scene()
    greedy = [await scene.begin_wait("greedy") for _ in range(5)]
    assert "tenant 'greedy'" in str(await refusal(greedy.pop()))
    honest = await scene.begin_wait("honest")
    assert not honest.done()
    scene.known = True
    scene.learning.on_change()
    for task in (*greedy, honest):
        await ended(task)
