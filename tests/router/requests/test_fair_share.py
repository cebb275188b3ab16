"""Fair shares of tenants."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from router.requests.admission import OUTPUT_COST, Admission
from router.shares import FairShare
from tests.fakes.admission import make_admission

PLENTY = (10_000, 10_000_000)


async def settle():
    for _ in range(3):
        await asyncio.sleep(0)


async def test_tenants_work_with_a_single_permit():
    admission = make_admission(1, *PLENTY, reserved=0.1)
    for tenant in ("a", "b"):
        permit = await asyncio.wait_for(admission.acquire(2, 1, tenant), 60)
        permit.release()


class Ring:
    """Runs admitted requests: each live request generates one token per turn and ends after `length` tokens."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.tokens: dict[str, int] = {}
        self.order: list[str] = []
        self.waits: list[tuple[str, int]] = []
        self.turn = 0
        self._running: list[list] = []
        self.tasks: list[asyncio.Task[None]] = []

    def submit(self, tenant: str, length: int = 8, prompt: int = 4) -> None:
        self.tasks.append(asyncio.ensure_future(self._submit(tenant, length, prompt)))

    async def _submit(self, tenant: str, length: int, prompt: int) -> None:
        arrival = self.turn
        permit = await self.admission.acquire(2, prompt, tenant)
        self.order.append(tenant)
        self.waits.append((tenant, self.turn - arrival))
        self._running.append([tenant, permit, length])

    async def run(self, turns: int) -> None:
        for _ in range(turns):
            await settle()
            self.turn += 1
            for running in list(self._running):
                tenant, permit, _ = running
                permit.charge_output(1)
                self.tokens[tenant] = self.tokens.get(tenant, 0) + 1
                running[2] -= 1
                if not running[2]:
                    self._running.remove(running)
                    permit.release()

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


async def test_two_greedy_tenants_get_half_each_regardless_of_request_sizes():
    ring = Ring(make_admission(4, *PLENTY))
    for _ in range(400):
        ring.submit("many small", length=4)
    for _ in range(60):
        ring.submit("few big", length=32)
    await ring.run(250)
    small, big = (
        ring.tokens["many small"] * OUTPUT_COST + 4 * ring.order.count("many small"),
        ring.tokens["few big"] * OUTPUT_COST + 4 * ring.order.count("few big"),
    )
    assert 0.8 < small / big < 1.25
    ring.close()


async def test_shares_follow_the_weights():
    ring = Ring(make_admission(6, *PLENTY, weights={"gold": 3.0}))
    for _ in range(500):
        ring.submit("gold")
        ring.submit("other")
    await ring.run(300)
    assert 2.4 < ring.tokens["gold"] / ring.tokens["other"] < 3.6
    ring.close()


async def test_absence_earns_no_credit():
    ring = Ring(make_admission(2, *PLENTY))
    for _ in range(200):
        ring.submit("steady")
    await ring.run(100)
    for _ in range(200):
        ring.submit("late")
    tokens_before = dict(ring.tokens)
    await ring.run(100)
    late, steady = ring.tokens["late"], ring.tokens["steady"] - tokens_before["steady"]
    assert 0.7 < late / steady < 1.4
    ring.close()


async def test_cached_tokens_are_cheaper():
    admission = make_admission(1, *PLENTY)
    running = await admission.acquire(2, 1, "a")
    first_tasks = {}
    for tenant in ("cached", "computed"):
        first_tasks[tenant] = asyncio.ensure_future(admission.acquire(2, 100, tenant))
        await settle()
    running.release()
    await settle()
    earlier = next(tenant for tenant, task in first_tasks.items() if task.done())
    later = ({"cached", "computed"} - {earlier}).pop()
    next_tasks = {tenant: asyncio.ensure_future(admission.acquire(2, 100, tenant)) for tenant in first_tasks}
    first_tasks[earlier].result().credit_cached(100 if earlier == "cached" else 0)
    first_tasks[earlier].result().release()
    await settle()
    first_tasks[later].result().credit_cached(100 if later == "cached" else 0)
    first_tasks[later].result().release()
    await settle()
    assert next_tasks["cached"].done()
    assert not next_tasks["computed"].done()
    next_tasks["computed"].cancel()


async def test_a_tenant_that_arrives_during_a_flood_need_not_wait_for_it():
    """A tenth of the slots is reserved for tenants that hold less than their share."""
    admission = make_admission(64, *PLENTY, reserved=0.1)
    admission.resize(64, 16)
    ring = Ring(admission)
    for _ in range(300):
        ring.submit("flood", length=100)
    await ring.run(3)
    assert admission.live == 14
    ring.submit("other", length=3)
    await ring.run(1)
    assert ("other", 0) in ring.waits
    ring.close()


async def test_without_tenants_no_slots_are_reserved():
    admission = make_admission(64, *PLENTY, reserved=0.1)
    admission.resize(64, 16)
    for _ in range(64):
        await admission.acquire(2, 1)
    assert admission.live == 64


async def test_one_tenant_does_not_fill_the_queue_for_all():
    admission = make_admission(1, 10, 1000, tenant_waiting=6)
    await admission.acquire(2, 1, "a")
    waiting = [asyncio.ensure_future(admission.acquire(2, 1, "a")) for _ in range(6)]
    await settle()
    with pytest.raises(RequestError, match=r"6 requests of the tenant 'a' are waiting, .* \(max_tenant_waiting\)"):
        await admission.acquire(2, 1, "a")
    waiting += [asyncio.ensure_future(admission.acquire(2, 1, "b")) for _ in range(4)]
    await settle()
    assert admission.waiting == 10
    with pytest.raises(RequestError, match=r"1 requests are live and 10 are waiting, .* \(max_waiting\)"):
        await admission.acquire(2, 1, "b")
    for task in waiting:
        task.cancel()


async def test_low_priority_is_not_starved_by_later_requests():
    now = [0.0]
    admission = make_admission(1, *PLENTY, aging_seconds=10.0, clock=lambda: now[0])
    permit = await admission.acquire(3, 1)
    low = asyncio.ensure_future(admission.acquire(1, 1))
    await settle()
    highs = []
    while not low.done():
        now[0] += 1.0
        highs.append(asyncio.ensure_future(admission.acquire(3, 1)))
        await settle()
        permit.release()
        await settle()
        permit = next((task.result() for task in highs if task.done() and task.result()._admission), permit)
        assert now[0] < 40
    assert now[0] >= 20
    for task in highs:
        task.cancel()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["enter", "leave", "charge"]), st.integers(1, 50))))
def test_no_tenant_accumulates_credit(actions):
    """A new tenant starts no lower than the least-served present one, and absent tenants are eventually forgotten."""
    shares, present = FairShare({"a": 2.0}), {"a": 0, "b": 0, "c": 0}
    for tenant, action, cost in actions:
        if action == "enter":
            floor = min((shares._served[other] for other in present if present[other]), default=0.0)
            shares.enter(tenant)
            present[tenant] += 1
            assert shares._served[tenant] >= floor
        elif present[tenant]:
            if action == "leave":
                shares.leave(tenant)
                present[tenant] -= 1
            else:
                shares.charge(tenant, cost)
    assert shares.tenants == sum(count > 0 for count in present.values())
    for tenant, count in present.items():
        for _ in range(count):
            shares.leave(tenant)
    assert not shares._served
