import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from sluice.wire.errors import ErrorCode
from tests.fakes.admission import make_admission


async def settle():
    for _ in range(3):
        await asyncio.sleep(0)


async def queue(admission, order, name, priority=2, tokens=1):
    permit = await admission.acquire(priority, tokens)
    order.append(name)
    return permit


async def test_priority_then_arrival():
    admission, order = make_admission(1, 10, 100), []
    first = await admission.acquire(1, 1)
    tasks = []
    for name, priority in (("low", 1), ("normal", 2), ("high", 3), ("normal too", 2)):
        tasks.append(asyncio.ensure_future(queue(admission, order, name, priority)))
        await settle()
    first.release()
    for _ in range(4):
        await settle()
        done = next(task for task in tasks if task.done())
        tasks.remove(done)
        done.result().release()
    assert order == ["high", "normal", "normal too", "low"]
    assert (admission.live, admission.waiting, admission.waiting_tokens) == (0, 0, 0)


async def test_a_permit_is_released_once():
    admission = make_admission(1, 0, 0)
    permit = await admission.acquire(2, 1)
    permit.release()
    permit.release()
    assert admission.live == 0


async def test_beyond_the_limits_it_raises_immediately():
    admission = make_admission(1, 2, 10)
    await admission.acquire(2, 1)
    waiting = [asyncio.ensure_future(admission.acquire(2, 50))]
    await settle()
    with pytest.raises(RequestError) as error:
        await admission.acquire(2, 1)
    assert error.value.code is ErrorCode.OVERLOADED
    waiting[0].cancel()
    await settle()
    waiting = [asyncio.ensure_future(admission.acquire(2, 1)) for _ in range(2)]
    await settle()
    with pytest.raises(RequestError):
        await admission.acquire(3, 1)
    for task in waiting:
        task.cancel()


async def test_a_waiter_cancelled_after_admission_releases_the_permit():
    admission = make_admission(1, 10, 100)
    first = await admission.acquire(2, 1)
    second = asyncio.ensure_future(admission.acquire(2, 1))
    await settle()
    first.release()
    second.cancel()
    await settle()
    assert second.cancelled()
    assert admission.live == 0


async def test_capacity_follows_the_engines():
    admission, order = make_admission(0, 10, 100), []
    tasks = [asyncio.ensure_future(queue(admission, order, i)) for i in range(4)]
    await settle()
    admission.resize(3)
    await settle()
    assert order == [0, 1, 2]
    admission.resize(1)
    tasks[0].result().release()
    await settle()
    assert order == [0, 1, 2]
    for task in tasks[1:3]:
        task.result().release()
    await settle()
    assert order == [0, 1, 2, 3]


@given(
    st.lists(
        st.tuples(st.sampled_from(["acquire", "cancel", "release", "grow", "shrink"]), st.integers(0, 30)), max_size=60
    )
)
def test_the_counts_are_right_after_any_actions(actions):
    async def run():
        capacity = 3
        admission = make_admission(capacity, 5, 40)
        tasks = []
        for action, number in actions:
            if action == "acquire":
                tasks.append(asyncio.ensure_future(admission.acquire(number % 3 + 1, number)))
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif action == "release" and tasks:
                task = tasks[number % len(tasks)]
                if task.done() and not task.cancelled() and not task.exception():
                    task.result().release()
            elif action in ("grow", "shrink"):
                capacity = max(1, capacity + (1 if action == "grow" else -1))
                admission.resize(capacity)
            if number % 2:
                await settle()
        await settle()
        held = [task for task in tasks if task.done() and not task.cancelled() and not task.exception()]
        assert admission.waiting == sum(not task.done() for task in tasks) <= 5
        assert admission.live == sum(task.result()._admission is not None for task in held)
        assert not admission.waiting or admission.live >= capacity
        for task in tasks:
            task.cancel()
        await settle()
        assert (admission.waiting, admission.waiting_tokens) == (0, 0)

    asyncio.run(run())
