"""More than there is room for: how soon the refused know, and what one tenant's flood is to another."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.lines import Lines
from bench.overload.refusals import Burst, Retried, Volley, burst, retried
from bench.overload.tenants import TenantPlan, Tenants, tenants
from bench.rounds import Step
from sluice.launch import Ring


class Plan(msgspec.Struct, frozen=True):
    """How much of it."""

    model: Path
    volleys: list[Volley]
    """One after the other."""
    retried: int
    """Requests at once, of the client that tries again."""
    max_live: int
    max_waiting: int
    first_backoff: float
    """Seconds, of that client, where the server does not say when to come again."""
    tenants: TenantPlan
    batch: int
    """The engine's, where tenants share it."""
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return len(self.volleys) + 2


class Result(msgspec.Struct, frozen=True):
    """Refusals, and two tenants."""

    max_live: int
    max_waiting: int
    bursts: list[Burst]
    retried: Retried
    tenants: Tenants


def measure(plan: Plan, _: Path, step: Step) -> Result:
    """A ring with a small queue, then one with a large one."""
    lines = Lines()
    small = {"max_live": plan.max_live, "max_waiting": plan.max_waiting}
    with Ring(plan.model, engine_args=plan.engine, router_args=small, observe=lines) as ring:
        bursts, again = asyncio.run(_refusals(ring, lines, plan, step))
    engine = {**plan.engine, "max_batch_size": plan.batch}
    with Ring(plan.model, engine_args=engine, observe=lines) as ring:
        shared = asyncio.run(tenants(ring.address, lines, plan.tenants, plan.batch))
        step("two tenants")
    return Result(plan.max_live, plan.max_waiting, bursts, again, shared)


async def _refusals(ring: Ring, lines: Lines, plan: Plan, step: Step) -> tuple[list[Burst], Retried]:
    bursts = []
    for volley in plan.volleys:
        bursts.append(await burst(ring, lines, volley))
        step(f"{volley.requests} requests in {volley.seconds:g} s")
    again = await retried(ring.address, plan.retried, plan.first_backoff)
    step(f"{plan.retried} at once with a retry policy")
    return bursts, again
