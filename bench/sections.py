"""Results into words and tables, the same for the page and the terminal."""

from typing import NamedTuple

from bench.parts import batching, peers, prefix, ring
from bench.stats import Figures
from bench.systems.through_ring import NAME as THROUGH_RING

SERVICES = ("router", "detok")


class Table(NamedTuple):
    """Cells as text. The first column names the row."""

    columns: list[str]
    rows: list[list[str]]


class Section(NamedTuple):
    """What one part found."""

    title: str
    question: str
    answers: list[str]
    tables: list[Table]


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
        f"**{points.title}**: through the ring {_span(ratios, '.0%')} of the engine's own tokens/s. The ring (router "
        f"and detokenizers) takes {_span(shares, '.1%')} of the servers' CPU time; the load generator on the same "
        f"cores costs another {_span(clients, '.0f')} µs per token."
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
            rows.append([of, name, _rate(figures), quotient, *_latencies(figures)])
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


def of_batching(result: batching.Result) -> Section:
    """In flight and static."""
    rows = [
        [name, _rate(figures), *_latencies(figures)]
        for name, figures in (("in flight", result.in_flight), ("static", result.static))
    ]
    return Section(
        "In-flight and static batching",
        f"{result.requests} requests with {result.shortest} to {result.longest} tokens of output, {result.width} at a "
        "time, through the ring. *Static*: the next group waits for the slowest of the one before.",
        [f"In flight gives **{result.ratio:.2f}×** the tokens/s of static batches."],
        [Table(["batching", "tokens/s (range)", "first token p50 · p99, ms", "inter-token p50 · p99, ms"], rows)],
    )


def of_prefix(result: prefix.Result) -> Section:
    """Cold and cached."""
    rows = [
        [
            str(point.prompt_tokens),
            str(point.cached_tokens),
            f"{point.cold:.1f}",
            f"{point.cached:.1f}",
            f"**{point.ratio:.1f}×**",
        ]
        for point in result.points
    ]
    longest = result.points[-1]
    return Section(
        "First token with and without a cached prefix",
        f"One stream through the ring; {result.share:.0%} of the prompt were computed by an earlier request. Only "
        "whole blocks are found again.",
        [f"A prompt of {longest.prompt_tokens} tokens gets its first token **{longest.ratio:.1f}×** sooner."],
        [Table(["prompt tokens", "from the cache", "cold, ms", "cached, ms", "sooner"], rows)],
    )


def of_peers(result: peers.Result) -> Section:
    """Beside transformers."""
    columns = [
        "",
        "tokens/s (range)",
        "by generate",
        "first token p50 · p99, ms",
        "inter-token p50 · p99, ms",
        "same tokens",
    ]
    tables = [
        Table(
            [table.work.title, *columns[1:]],
            [
                [
                    entry.system,
                    _rate(entry.figures),
                    f"**{entry.ratio:.2f}×**",
                    *_latencies(entry.figures),
                    f"{entry.same}/{table.work.requests}",
                ]
                for entry in table.entries
            ],
        )
        for table in result.tables
    ]
    return Section(
        "Beside transformers",
        "The same checkpoint in float32, requests, greedy sampling, output lengths and number of threads. `generate` "
        "runs padded groups that wait for their slowest; tokens past the length that a request asked for are not "
        "counted. Continuous batching is the library's own scheduler over its paged cache, with SDPA. *Same tokens*: "
        "requests whose output equals that of `generate`.",
        [_beside(table) for table in result.tables],
        tables,
    )


def _beside(table: peers.Table) -> str:
    ratios = {entry.system: entry.ratio for entry in table.entries}
    return f"{table.work.title}: the ring gives **{ratios[THROUGH_RING]:.2f}×** the tokens/s of transformers' generate."


def _streams(shape: ring.Shape) -> str:
    return (
        f"{shape.streams} stream{'s' if shape.streams > 1 else ''}, {shape.prompt_tokens} in, {shape.output_tokens} out"
    )


def _rate(figures: Figures) -> str:
    slowest, fastest = figures.tokens_per_second_range
    return f"{_number(figures.tokens_per_second)} ({_number(slowest)}–{_number(fastest)})"


def _latencies(figures: Figures) -> list[str]:
    return [
        f"{_number(figures.first_token_p50)} · {_number(figures.first_token_p99)}",
        f"{_number(figures.inter_token_p50)} · {_number(figures.inter_token_p99)}",
    ]


def _number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
