"""The cost of the HTTP gateway: CPU time per request and per chunk, between a router and HTTP clients."""

from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from matplotlib.figure import Figure

from bench.harness.style import BLUE, GREY, Series, bars, canvas, frame
from bench.harness.tables import Section, Table, number, numbers, plural, span, table
from bench.harness.topic import Plan, Step, Topic
from bench.systems.gateway_alone import GatewayAlone, HttpStreams, gateway_alone


class GatewayPlan(Plan, frozen=True, kw_only=True):
    sizes: list[int]
    """Concurrent streams."""
    chunks: int = 16_000
    """Total chunks of one measurement."""
    requests: int = 512
    """Total requests of the load in which each has a single chunk."""
    row_seconds: float = 0.0005
    """Speed of the scripted engine: seconds per chunk."""
    repeats: int = 5


class GatewayCost(msgspec.Struct, frozen=True):
    """µs of the gateway's CPU time; times in ms."""

    request: float
    chunk: float
    first_chunk_p50: float
    gap_p50: float
    gap_p99: float


class GatewayPoint(msgspec.Struct, frozen=True):
    streams: int
    costs: list[GatewayCost]
    """One per round."""


class GatewayResult(GatewayPlan, frozen=True, kw_only=True):
    points: list[GatewayPoint]


def measure(plan: GatewayPlan, logs: Path, step: Step) -> GatewayResult:
    points = [GatewayPoint(size, []) for size in plan.sizes]
    with gateway_alone(plan.row_seconds, logs) as gateway:
        gateway.run(HttpStreams(8, 8))
        for repeat in range(plan.repeats):
            for point in points:
                point.costs.append(_cost(gateway, plan, point.streams))
                step(f"{plural(point.streams, 'stream')}, round {repeat + 1} of {plan.repeats}")
    return GatewayResult(**msgspec.structs.asdict(plan), points=points)


def _cost(gateway: GatewayAlone, plan: GatewayPlan, streams: int) -> GatewayCost:
    """Solves for the costs from two loads that differ in the number of chunks per request."""
    short = [gateway.run(HttpStreams(streams, 1)) for _ in range(max(1, plan.requests // streams))]
    long = gateway.run(HttpStreams(streams, max(2, plan.chunks // streams)))
    counts = [(len(short) * streams, sum(seen.chunks for seen in short)), (streams, long.chunks)]
    used = [sum(seen.gateway_seconds for seen in short), long.gateway_seconds]
    request, chunk = (1e6 * np.linalg.solve(np.array(counts, float), np.array(used))).tolist()
    return GatewayCost(request, chunk, short[0].first_chunk_p50, long.gap_p50, long.gap_p99)


def section(result: GatewayResult) -> Section:
    costs = [_medians(point) for point in result.points]
    return Section(
        "Cost of the HTTP gateway",
        "A gateway between a router with scripted peers, which compute nothing, and HTTP clients that read chats as "
        "server-sent events, one token per chunk. Two loads (one chunk, and many chunks per request) give the CPU "
        "time per request and per chunk.",
        [
            f"**{span([cost.request / 1000 for cost in costs], '.1f')} ms** per request and "
            f"**{span([cost.chunk for cost in costs], '.0f')} µs** per chunk."
        ],
        [_costs(result, costs)],
    )


def _medians(point: GatewayPoint) -> GatewayCost:
    fields = msgspec.structs.fields(GatewayCost)
    return GatewayCost(*(median(getattr(cost, field.name) for cost in point.costs) for field in fields))


def _costs(result: GatewayResult, costs: list[GatewayCost]) -> Table:
    rows = []
    for point, cost in zip(result.points, costs, strict=True):
        of_requests = span([each.request for each in point.costs], ".0f")
        of_chunks = span([each.chunk for each in point.costs], ".0f")
        rows.append(
            f"{plural(point.streams, 'stream')} | {number(cost.request)} ({of_requests}) | {number(cost.chunk)} "
            f"({of_chunks}) | {number(cost.first_chunk_p50)} | {numbers(cost.gap_p50, cost.gap_p99)}"
        )
    times = "first chunk p50, ms | between chunks p50 · p99, ms"
    return table(f"CPU µs, medians (ranges) | per request | per chunk | {times}", rows)


def draw(result: GatewayResult) -> Figure:
    costs = [_medians(point) for point in result.points]
    about = "CPU time of the gateway's process, between a router and HTTP clients. Medians."
    figure, ((requests, chunks),) = canvas((1, 2), (9, 4.2), "Cost of the HTTP gateway", about)
    names = [plural(point.streams, "stream") for point in result.points]
    for axes, heading, what, colour in (
        (requests, "Per request", "request", GREY),
        (chunks, "Per chunk", "chunk", BLUE),
    ):
        bars(axes, names, [Series(heading, colour, [getattr(cost, what) for cost in costs])])
        frame(axes, heading, "µs")
    return figure


QUICK = GatewayPlan(sizes=[8], chunks=64, requests=8, repeats=1)
TOPIC = Topic(GatewayPlan(sizes=[16, 64, 256]), QUICK, measure, GatewayResult, section, draw)
