"""Beside transformers."""

from bench.parts import peers
from bench.sections.words import Section, Table, latencies, rate
from bench.systems.through_ring import NAME as THROUGH_RING


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
                    rate(entry.figures),
                    f"**{entry.ratio:.2f}×**",
                    *latencies(entry.figures),
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
