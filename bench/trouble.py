"""How much is measured where things go wrong: deaths, restarts, too many requests, clients that do not read."""

from pathlib import Path

from msgspec.structs import replace

from bench.models import TINY
from bench.overload.refusals import Volley
from bench.overload.tenants import TenantPlan
from bench.parts import deaths, overload, restart, slow_reader
from bench.plans import engine_settings


def deaths_plan(quick: bool, threads: int, _: Path) -> deaths.Plan:
    """A death every two seconds."""
    how_much = {"streams": 8, "kills": 3, "max_tokens": 60} if quick else {}
    plan = deaths.Plan(**how_much)
    return replace(plan, threads=max(1, threads // plan.engines))


def soak_plan(quick: bool, threads: int, folder: Path) -> deaths.Plan:
    """Half an hour with a death every 20 s."""
    return soak_of(0.1 if quick else 30.0, 5.0 if quick else 20.0, deaths_plan(quick, threads, folder))


def soak_of(minutes: float, every: float, plan: deaths.Plan, **others: int) -> deaths.Plan:
    """So many minutes, and a death every so many seconds; the rest as in `plan`, but for what else is given."""
    return replace(plan, **others, kills=max(1, round(60 * minutes / every)), seconds_between=every)


def restart_plan(quick: bool, threads: int, _: Path) -> restart.Plan:
    """An engine stands still for half a minute."""
    plan = restart.Plan()
    if quick:
        plan = replace(plan, streams=6, max_tokens=60, stopped_seconds=5.0, after_seconds=3.0)
    return replace(plan, threads=max(1, threads // plan.engines))


def overload_plan(quick: bool, threads: int, _: Path) -> overload.Plan:
    """A thousand requests and more against a queue of sixteen; a flood of four batches."""
    requests = 100 if quick else 1000
    paced = [Volley(requests, seconds) for seconds in ((0.0, 1.0) if quick else (0.0, 1.0, 5.0))]
    return overload.Plan(
        model=TINY,
        volleys=[*paced, Volley(4 * requests, connections=8)],
        retried=requests,
        max_live=8,
        max_waiting=16,
        first_backoff=1.0 if quick else 4.0,
        tenants=TenantPlan(1, 3, 16, 100) if quick else TenantPlan(5, 40, 64, 400),
        batch=8 if quick else 16,
        engine=engine_settings(threads),
    )


def slow_reader_plan(quick: bool, threads: int, _: Path) -> slow_reader.Plan:
    """Ten minutes without a read at the end."""
    return slow_reader.Plan(
        model=TINY,
        neighbours=4 if quick else 32,
        neighbour_tokens=60 if quick else 200,
        slow_tokens=900 if quick else 1500,
        undelivered_tokens=64 if quick else 256,
        rounds=1 if quick else 8,
        seconds=2.0 if quick else 15.0,
        long_seconds=2.0 if quick else 600.0,
        engine=engine_settings(threads),
    )
