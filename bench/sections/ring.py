"""Engine alone and through the ring."""

from bench.parts import ring
from bench.sections.words import Section, Table, latencies, rate, span
from bench.stats import Figures

SERVICES = ("router", "detok")


def of_ring(result: ring.Result) -> Section:
    """The engine alone and through the ring."""
    return Section(
        "Engine alone and through the ring",
        "The same engine with the same settings: driven in process, and behind router, two detokenizers and a gRPC "
        "client process. All streams begin at once; a stream's *inter-token* time is that between two deltas.",
        [_share(points) for points in result.models],
        [table for points in result.models for table in (_speeds(points), _costs(points))],
    )


def _share(points: ring.Points) -> str:
    ratios = [point.ratio for point in points.points]
    shares = [_ring_share(point.ring) for point in points.points]
    clients = [point.ring.cpu_per_token["client"] for point in points.points]
    return (
        f"**{points.title}**: through the ring {span(ratios, '.0%')} of the engine's own tokens/s. The ring (router "
        f"and detokenizers) takes {span(shares, '.1%')} of the servers' CPU time; the load generator on the same "
        f"cores costs another {span(clients, '.0f')} µs per token."
    )


def _ring_share(figures: Figures) -> float:
    own = sum(figures.cpu_per_token[service] for service in SERVICES)
    return own / (own + figures.cpu_per_token["engine"])


def _speeds(points: ring.Points) -> Table:
    columns = [
        points.title,
        "",
        "tokens/s (range)",
        "ring / alone",
        "first token p50 · p99, ms",
        "inter-token p50 · p99, ms",
    ]
    rows = []
    for point in points.points:
        for name, figures in (("engine alone", point.alone), ("through the ring", point.ring)):
            of = _streams(point.shape) if name == "engine alone" else ""
            quotient = "" if name == "engine alone" else f"**{point.ratio:.2f}**"
            rows.append([of, name, rate(figures), quotient, *latencies(figures)])
    return Table(columns, rows)


def _costs(points: ring.Points) -> Table:
    columns = [
        "CPU µs per token",
        "engine alone",
        "engine in the ring",
        "router",
        "detokenizers",
        "client",
        "tokens per delta",
    ]
    rows = []
    for point in points.points:
        used = point.ring.cpu_per_token
        cells = [point.alone.cpu_per_token["engine"], used["engine"], *(used[name] for name in SERVICES)]
        rows.append(
            [
                _streams(point.shape),
                *(f"{cell:.0f}" for cell in cells),
                f"{used['client']:.0f}",
                f"{point.ring.tokens_per_delta:.2f}",
            ]
        )
    return Table(columns, rows)


def _streams(shape: ring.Shape) -> str:
    return (
        f"{shape.streams} stream{'s' if shape.streams > 1 else ''}, {shape.prompt_tokens} in, {shape.output_tokens} out"
    )
