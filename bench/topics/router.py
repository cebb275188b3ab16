"""The cost of a router: CPU time per request, per delta and per token, between scripted peers and real clients."""

from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from matplotlib.figure import Figure

from bench.harness.style import BLUE, GREY, TEAL, Series, bars, canvas, frame
from bench.harness.tables import Section, Table, number, numbers, plural, span, table
from bench.harness.topic import Plan, Step, Topic
from bench.systems.router_alone import RouterAlone, Seen, Streams, router_alone

JOINED = 8
"""Tokens per row of the load in which rows have several."""


class RouterPlan(Plan, frozen=True, kw_only=True):
    sizes: list[int]
    """Concurrent streams."""
    rows: int = 16_000
    """Total rows of one measurement."""
    requests: int = 1000
    """Total requests of the load in which each has a single row."""
    row_seconds: float = 0.0005
    """Seconds per row of a scripted engine that the router can keep up with."""
    fast_row_seconds: float = 0.00002
    """Seconds per row of a scripted engine that is faster than the router."""
    repeats: int = 5


class RouterCost(msgspec.Struct, frozen=True):
    """CPU time of the router in µs, and waiting times in ms."""

    request: float
    delta: float
    token: float
    first_token_p50: float
    """The waiting times are those of streams with one token per row."""
    gap_p50: float
    gap_p99: float


class RouterPoint(msgspec.Struct, frozen=True):
    """Results per round; `fast` are those with the engine that is faster than the router."""

    streams: int
    costs: list[RouterCost]
    fast: list[Seen]


class RouterResult(RouterPlan, frozen=True, kw_only=True):
    points: list[RouterPoint]


def measure(plan: RouterPlan, logs: Path, step: Step) -> RouterResult:
    points = [RouterPoint(size, [], []) for size in plan.sizes]
    with (
        router_alone("paced", plan.row_seconds, logs) as paced,
        router_alone("fast", plan.fast_row_seconds, logs) as fast,
    ):
        for system in (paced, fast):
            system.run(Streams(8, 2))
        for repeat in range(plan.repeats):
            for point in points:
                point.costs.append(_cost(paced, plan, point.streams))
                point.fast.append(fast.run(Streams(point.streams, max(2, plan.rows // point.streams))))
                step(f"{plural(point.streams, 'stream')}, round {repeat + 1} of {plan.repeats}")
    return RouterResult(**msgspec.structs.asdict(plan), points=points)


def _cost(router: RouterAlone, plan: RouterPlan, streams: int) -> RouterCost:
    """Solves for the costs from three loads that differ in the numbers of deltas and tokens per request."""
    rows = max(2, plan.rows // streams)
    short = [router.run(Streams(streams, 1)) for _ in range(max(1, plan.requests // streams))]
    single, joined = router.run(Streams(streams, rows)), router.run(Streams(streams, rows, JOINED))
    loads = [(len(short) * streams, short), (streams, [single]), (streams, [joined])]
    counts = [(requests, sum(s.deltas for s in seen), sum(s.tokens for s in seen)) for requests, seen in loads]
    used = [sum(s.router_seconds for s in seen) for _, seen in loads]
    request, delta, token = (1e6 * np.linalg.solve(np.array(counts, float), np.array(used))).tolist()
    return RouterCost(request, delta, token, short[0].first_token_p50, single.gap_p50, single.gap_p99)


def section(result: RouterResult) -> Section:
    costs = [_medians(point) for point in result.points]
    return Section(
        "Cost of a router",
        "A router between scripted peers, which compute nothing, and gRPC clients on eight connections. Three loads "
        f"(one token per request; many rows of one token; as many rows of {JOINED} tokens) give the CPU time per "
        "request, delta and token.",
        [
            f"**{span([cost.request / 1000 for cost in costs], '.1f')} ms** per request, "
            f"**{span([cost.delta for cost in costs], '.0f')} µs** per delta and "
            f"**{span([cost.token for cost in costs], '.1f')} µs** per token."
        ],
        [_costs(result, costs), _fast(result)],
    )


def _medians(point: RouterPoint) -> RouterCost:
    fields = msgspec.structs.fields(RouterCost)
    return RouterCost(*(median(getattr(cost, field.name) for cost in point.costs) for field in fields))


def _costs(result: RouterResult, costs: list[RouterCost]) -> Table:
    rows = []
    for point, cost in zip(result.points, costs, strict=True):
        of_requests = span([each.request for each in point.costs], ".0f")
        of_deltas = span([each.delta for each in point.costs], ".0f")
        gaps = f"{number(cost.first_token_p50)} | {numbers(cost.gap_p50, cost.gap_p99)}"
        rows.append(
            f"{plural(point.streams, 'stream')} | {number(cost.request)} ({of_requests}) | {number(cost.delta)} "
            f"({of_deltas}) | {number(cost.token)} | {gaps}"
        )
    times = "first token p50, ms | inter-token p50 · p99, ms"
    return table(f"CPU µs, medians (ranges) | per request | per delta | per token | {times}", rows)


def _fast(result: RouterResult) -> Table:
    rows = []
    for point in result.points:
        rates = [seen.tokens / seen.seconds for seen in point.fast]
        used = median(1e6 * seen.router_seconds / seen.tokens for seen in point.fast)
        joined = median(seen.tokens / seen.deltas for seen in point.fast)
        rows.append(f"{plural(point.streams, 'stream')} | {number(median(rates))} | {number(used)} | {number(joined)}")
    return table("an engine faster than the router | tokens/s | CPU µs per token | tokens per delta", rows)


def draw(result: RouterResult) -> Figure:
    costs = [_medians(point) for point in result.points]
    about = "CPU time of the router's process, between scripted peers and gRPC clients. Medians."
    figure, ((requests, deltas, tokens),) = canvas((1, 3), (13, 4.2), "Cost of a router", about)
    names = [plural(point.streams, "stream") for point in result.points]
    for axes, heading, what, colour in (
        (requests, "Per request", "request", GREY),
        (deltas, "Per delta", "delta", BLUE),
        (tokens, "Per token", "token", TEAL),
    ):
        bars(axes, names, [Series(heading, colour, [getattr(cost, what) for cost in costs])])
        frame(axes, heading, "µs")
    return figure


QUICK = RouterPlan(sizes=[8], rows=64, requests=8, repeats=1)
TOPIC = Topic(RouterPlan(sizes=[64, 256, 1000]), QUICK, measure, RouterResult, section, draw)
