"""In virtual time: late operations end with the guard's error; all others behave as without a guard."""

import asyncio

import pytest

from router.api.watchdog import Watchdog
from tests.sim.loop import VirtualLoop

SECONDS = 10.0


class TooLongError(Exception):
    """The error that the guards in these tests raise."""


@pytest.fixture
def run():
    """Runs a coroutine on a loop whose time jumps to the next timer."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        yield runner.run


async def work(watchdog, *seconds):
    """Run operations of these durations (seconds), one after the other. Returns the loop time at the end."""
    with watchdog.guard(TooLongError) as guard:
        for duration in seconds:
            guard.begin()
            await asyncio.sleep(duration)
            guard.end()
    return asyncio.get_running_loop().time()


def test_each_operation_has_the_full_time(run):
    async def main():
        watchdog = Watchdog(SECONDS)
        start = asyncio.get_running_loop().time()
        assert await work(watchdog, 9.0, 9.0, 9.0) == pytest.approx(start + 27.0, abs=0.01)
        with pytest.raises(TooLongError):
            await work(watchdog, 9.0, 11.0)
        assert asyncio.get_running_loop().time() == pytest.approx(start + 27.0 + 19.0, abs=0.01)

    run(main())


def test_time_between_operations_does_not_count(run):
    async def main():
        watchdog = Watchdog(SECONDS)
        with watchdog.guard(TooLongError) as guard:
            guard.begin()
            guard.end()
            await asyncio.sleep(100.0)

    run(main())


def test_only_late_operations_end_and_on_time(run):
    async def main():
        watchdog, loop = Watchdog(SECONDS), asyncio.get_running_loop()
        start, ended = loop.time(), {}

        async def run_one(i):
            await asyncio.sleep(i)
            try:
                await work(watchdog, 20.0 if i % 3 == 0 else 5.0)
            except TooLongError:
                ended[i] = loop.time() - start

        await asyncio.gather(*map(run_one, range(30)))
        assert ended == {i: pytest.approx(i + SECONDS, abs=0.01) for i in range(0, 30, 3)}

    run(main())


def test_the_task_continues_after_the_error(run):
    async def main():
        watchdog = Watchdog(SECONDS)
        with pytest.raises(TooLongError) as error:
            await work(watchdog, 11.0)
        assert isinstance(error.value.__cause__, asyncio.CancelledError)
        assert asyncio.current_task().cancelling() == 0
        await work(watchdog, 1.0)

    run(main())


@pytest.mark.parametrize("after", [5.0, SECONDS])
def test_a_cancellation_from_elsewhere_remains_one_even_together_with_the_watchdogs(run, after):
    async def main():
        watchdog = Watchdog(SECONDS)
        task = asyncio.create_task(work(watchdog, 20.0))
        asyncio.get_running_loop().call_later(after, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run(main())


def test_another_error_of_a_late_operation_is_not_hidden(run):
    async def main():
        watchdog = Watchdog(SECONDS)

        async def fail():
            with watchdog.guard(TooLongError) as guard:
                guard.begin()
                try:
                    await asyncio.sleep(20.0)
                except asyncio.CancelledError:
                    raise ValueError("its own") from None

        with pytest.raises(ValueError, match="its own"):
            await fail()

    run(main())


def test_no_timer_runs_without_operations(run):
    async def main():
        watchdog = Watchdog(SECONDS)
        for _ in range(3):
            await work(watchdog, 1.0)
        await asyncio.sleep(2 * SECONDS)
        assert watchdog._timer is None
        with pytest.raises(TooLongError):
            await work(watchdog, 11.0)

    run(main())
