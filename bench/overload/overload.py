"""Overload: the time to a rejection, and the effect of one tenant's flood on another tenant."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from bench.harness.models import TINY
from bench.harness.style import BLUE, GREY, INK, ORANGE, TEAL, Series, canvas, distribution
from bench.harness.tables import Section, number, numbers, table
from bench.harness.topic import Plan, Step, Topic, engine_settings
from bench.overload import floods
from sluice.launch import LogLine, Ring
from sluice.loadgen.report import percentile

MOST_TIMES_SLOWER = 2.0


class OverloadPlan(Plan, frozen=True):
    volleys: list[floods.Volley]
    retried: int
    first_backoff: float
    """Seconds of the client's first backoff, which applies if the server sends no retry delay."""
    tenants: floods.TenantPlan
    batch: int
    max_live: int = 8
    max_waiting: int = 16


class OverloadResult(msgspec.Struct, frozen=True):
    max_live: int
    max_waiting: int
    bursts: list[floods.Burst]
    retried: floods.Retried
    tenants: floods.Tenants


def measure(plan: OverloadPlan, _: Path, step: Step) -> OverloadResult:
    """Measures a ring with a small queue, then a ring with a large queue."""
    lines: list[LogLine] = []
    small = {"max_live": plan.max_live, "max_waiting": plan.max_waiting}
    with Ring(TINY, engine_args=engine_settings(plan.threads), router_args=small, observe=lines.append) as ring:
        bursts = []
        for volley in plan.volleys:
            bursts.append(asyncio.run(floods.measure_burst(ring, lines, volley)))
            step(f"{volley.requests} requests in {volley.seconds:g} s")
        again = asyncio.run(floods.measure_retries(ring.address, plan.retried, plan.first_backoff))
        step(f"{plan.retried} at once with a retry policy")
    engine = engine_settings(plan.threads, max_batch_size=plan.batch)
    with Ring(TINY, engine_args=engine, observe=lines.append) as ring:
        shared = asyncio.run(floods.measure_tenants(ring.address, lines, plan.tenants, plan.batch))
        step("two tenants")
    return OverloadResult(plan.max_live, plan.max_waiting, bursts, again, shared)


def section(result: OverloadResult) -> Section:
    plan, tenants = result.tenants.plan, result.tenants
    refusals = (
        f"{each.requests:,} {_within(each)} | {each.served} | {each.refused} | {_percentiles(each.client)} | "
        f"{_percentiles(each.router)} | {numbers(each.cpu['client'], each.cpu['router'])}"
        for each in result.bursts
    )
    waits = (
        f"{name} | {_percentiles(times.first_token)} | {_percentiles(times.queue)} | {_percentiles(times.gaps)}"
        for name, times in (("alone", tenants.alone), ("during the flood", tenants.flooded))
    )
    cells = "at the client p50 · p99, ms | in the router p50 · p99, ms | CPU per request of client · router, ms"
    return Section(
        "Overload",
        f"A router with at most {result.max_live} live and {result.max_waiting} waiting requests. *At the client*: "
        "time from call to rejection, in one Python event loop that makes all calls; *in the router*: time since it "
        f"has read the message. Then an engine with a batch of {tenants.batch}, where one tenant always has "
        f"{plan.flood} requests of {plan.flood_tokens} tokens in flight and another tenant sends small requests one "
        "after the other.",
        [*map(_refused, result.bursts), _retried(result.retried), _flooded(tenants)],
        [
            table(f"requests | served | rejected | {cells}", refusals),
            table("p50 · p99, ms | first token | thereof in the router | between two tokens", waits),
        ],
    )


def _refused(burst: floods.Burst) -> str:
    unexplained = f" **{_statuses(burst.unexplained)}** without a response of the router." if burst.unexplained else ""
    return (
        f"{burst.requests:,} requests {_within(burst)}: {burst.refused} are rejected, {burst.told_when} of them with "
        f"RetryInfo, within **{number(percentile(burst.client, 99))} ms** (p99) at the client and "
        f"{number(percentile(burst.router, 99))} ms in the router.{unexplained}"
    )


def _retried(retried: floods.Retried) -> str:
    errors = f" (others: {_statuses(retried.errors)})" if retried.errors else ""
    served = f"{retried.served:,} of {retried.requests:,} requests sent together are served{errors}"
    return f"With gRPC's retries {served}, within {retried.seconds:.0f} s."


def _statuses(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))


def _flooded(tenants: floods.Tenants) -> str:
    ratios = [percentile(tenants.flooded.first_token, p) / percentile(tenants.alone.first_token, p) for p in (50, 99)]
    return (
        f"During another tenant's flood, a tenant's time to first token is {ratios[0]:.1f} times as long as alone "
        f"(p50), and **{ratios[1]:.1f} times** at p99 (limit: {MOST_TIMES_SLOWER:g})."
    )


def _within(burst: floods.Burst) -> str:
    when = f"within {burst.seconds:g} s" if burst.seconds else "together"
    return when if burst.connections == 1 else f"{when} over {burst.connections} connections"


def _percentiles(times: Sequence[float]) -> str:
    return numbers(percentile(times, 50), percentile(times, 99))


def draw(result: OverloadResult) -> Figure:
    tenants = result.tenants
    limits = f"At most {result.max_live} live and {result.max_waiting} waiting requests"
    about = f"{limits}; then two tenants, one of which floods with {tenants.plan.flood} requests in flight."
    figure, ((left, right),) = canvas((1, 2), (12, 4.8), "Overload", about)
    refusals = [Series("in the router", TEAL, result.bursts[0].router)]
    for burst, colour in zip(result.bursts, (GREY, ORANGE, BLUE, INK), strict=False):
        refusals.append(Series(f"{burst.requests:,} {_within(burst)}", colour, burst.client))
    distribution(left, "Time to rejection", "ms", refusals)
    waits = [Series("alone", BLUE, tenants.alone.first_token), Series("flood", ORANGE, tenants.flooded.first_token)]
    distribution(right, "Quiet tenant: time to first token", "ms", waits, "linear")
    return figure


VOLLEYS = [floods.Volley(1000), floods.Volley(1000, 1.0), floods.Volley(1000, 5.0), floods.Volley(4000, connections=8)]
QUICK_VOLLEYS = [floods.Volley(40), floods.Volley(40, 1.0), floods.Volley(160, connections=8)]
FULL = OverloadPlan(VOLLEYS, 1000, 4.0, floods.TenantPlan(5, 40, 64, 400), 16)
QUICK = OverloadPlan(QUICK_VOLLEYS, 40, 1.0, floods.TenantPlan(1, 3, 16, 100), 8)
TOPIC = Topic(FULL, QUICK, measure, OverloadResult, section, draw)
