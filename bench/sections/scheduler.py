"""What a step costs beside the model."""

from bench.parts import scheduler
from bench.parts.policies import POLICIES
from bench.sections.words import Section, Table, number

LIMIT = 1000.0
"""Microseconds that a step of 256 sequences may take."""
LIMIT_AT = 256


def of_scheduler(result: scheduler.Result) -> Section:
    """By the number of sequences."""
    waiting = sorted({point.waiting for point in result.points})
    return Section(
        "What a step costs beside the model",
        "The engine's core around a runner that computes nothing, every sequence generating. *Scheduling* is from "
        "taking requests in to the call of the runner: expiry, schedule, planning. The *whole* step adds committing "
        f"tokens, rows and statistics. {result.samples} steps a round.",
        [_answer(result, queue) for queue in waiting],
        [_table(result, queue) for queue in waiting],
    )


def _answer(result: scheduler.Result, waiting: int) -> str:
    most = max(point.running for point in result.points)
    at = LIMIT_AT if any(point.running == LIMIT_AT for point in result.points) else most
    here = [point for point in result.points if (point.running, point.waiting) == (at, waiting)]
    last = [point for point in result.points if (point.running, point.waiting) == (most, waiting)]
    slowest = max(point.costs.schedule for point in here)
    whole = max(point.costs.whole for point in last)
    return (
        f"{_queue(waiting)}: scheduling {at:,} sequences takes **{number(slowest)} µs** at most (it may take "
        f"{number(LIMIT)}), and at {most:,} the whole step **{number(whole / most)} µs** for each of them."
    )


def _table(result: scheduler.Result, waiting: int) -> Table:
    sizes = sorted({point.running for point in result.points})
    columns = [
        f"µs of a step, p50 · p99, {_queue(waiting)}",
        *(f"{size:,} running" for size in sizes),
        f"of each of {sizes[-1]:,}",
    ]
    rows = []
    for policy, name in POLICIES.items():
        points = result.of(policy, waiting)
        costs = [point.costs for point in points]
        rows.append(
            [
                f"{name}: scheduling",
                *(f"{number(cost.schedule)} · {number(cost.schedule_p99)}" for cost in costs),
                f"{costs[-1].schedule / sizes[-1]:.2f}",
            ]
        )
        rows.append(
            [
                f"{name}: whole",
                *(f"{number(cost.whole)} · {number(cost.whole_p99)}" for cost in costs),
                f"{costs[-1].whole / sizes[-1]:.2f}",
            ]
        )
    return Table(columns, rows)


def _queue(waiting: int) -> str:
    return f"{waiting:,} requests wait" if waiting else "nobody waits"
