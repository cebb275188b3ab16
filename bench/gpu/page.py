"""Findings as tables, for a terminal and for docs/measurements."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.gpu.findings import RUNS, Findings, Tried
from bench.gpu.measures import AS_SERVED, EAGER, SLUICE
from bench.gpu.shapes import LARGE, SMALL
from bench.harness.tables import Table, short

Rows = Sequence[Sequence[str]]
COPY_SHARE = 0.8
GRAPHS_FACTOR = 1.5
HIDDEN_SHARE = 0.8


class Goal(NamedTuple):
    name: str
    wanted: str
    found: str
    met: bool


def goals(found: Findings) -> list[Goal]:
    """Goals whose both sides were measured."""
    made = []
    alone = {(one.shape, one.mode): one for one in found.decode if one.batch == 1}
    large = alone.get((LARGE.name, AS_SERVED))
    if large is not None and found.rates is not None:
        share = large.bytes_per_second / found.rates.copy_bytes_per_second
        name = f"{LARGE.name}, batch 1: of the copy's bandwidth"
        made.append(Goal(name, f"{COPY_SHARE:.0%}", f"{share:.0%}", share >= COPY_SHARE))
    beside = [one for one in found.throughput if (one.shape, one.batch) == (LARGE.name, 64)]
    rates = {one.system: one.tokens_per_second for one in beside}
    ours = rates.pop(SLUICE, None)
    if ours is not None and rates:
        best = max(rates, key=lambda system: rates[system])
        share = ours / rates[best]
        made.append(Goal(f"{LARGE.name}, batch 64: of the best peer, {best}", "1.00", f"{share:.2f}", share >= 1))
    graphs, eager = alone.get((SMALL.name, AS_SERVED)), alone.get((SMALL.name, EAGER))
    if graphs is not None and eager is not None:
        factor = eager.step_seconds / graphs.step_seconds
        name = f"{SMALL.name}, batch 1: of eager steps"
        made.append(Goal(name, f"{GRAPHS_FACTOR:.1f}", f"{factor:.2f}", factor >= GRAPHS_FACTOR))
    steps = [one for one in found.gaps if (one.shape, one.mode) == (SMALL.name, AS_SERVED)]
    idle = {(one.batch, one.overlap): one.idle_seconds for one in steps}
    for batch in sorted({batch for batch, _ in idle}):
        plain, ahead = idle.get((batch, False)), idle.get((batch, True))
        if plain and ahead is not None:
            hidden = 1 - ahead / plain
            name = f"{SMALL.name}, batch {batch}: of the idle time, hidden by overlap"
            made.append(Goal(name, f"{HIDDEN_SHARE:.0%}", f"{hidden:.0%}", hidden >= HIDDEN_SHARE))
    return made


def tables(found: Findings) -> list[Table]:
    made = [
        _table("The machine", "what | found", list(found.facts.items())),
        _table(
            "Goals", "goal | wanted | found |", [(*goal[:3], "met" if goal.met else "missed") for goal in goals(found)]
        ),
        _table("The device", "what | found", _device(found)),
        _table("Kernels", "kernel, in its own process | heads | | first, s | fastest, ms", map(_tried, found.tried)),
        _table("Checks", "check | | how", _checks(found)),
        _table("At fault", "check | layer, and what was tried", list(found.blamed.items())),
        _table("Memory of the default path, GiB", "after | tensors | torch's | free", _memory(found)),
        _table(
            "Generation, through the engine's loop",
            "generation | batch | context | ms per step | tokens/s | GB/s | of the copy's",
            _decode(found),
        ),
        _table(
            "Context, through the engine's loop",
            "context | prompts | tokens/s | TFLOP/s | of the matrix product's",
            _context(found),
        ),
        _table(
            "Gaps between steps", "steps | batch | µs per step | µs idle per step, profiled | longest, µs", _gaps(found)
        ),
        _table(
            "Side by side", "side by side | requests | tokens | output tokens/s | of the best", _side_by_side(found)
        ),
        _table("Skipped", "what | why", [(name, _brief(why)) for name, why in found.skipped.items()]),
        _table("Failed", "what | how", [(name, _last(trace)) for name, trace in found.failed.items()]),
    ]
    return [table for table in made if table.rows]


def markdown(found: Findings) -> str:
    origin = "; ".join(f"{name} {value}" for name, value in found.origin.items() if name != "command")
    command = found.origin.get("command", "python -m bench.gpu")
    parts = [f"# The GPU engine, measured\n\n`{command}`: {origin}. Data: [gpu.json](gpu.json)."]
    parts += found.notes
    if found.doing:
        parts.append(f"Incomplete: *{found.doing}* was running when this was written.")
    if found.decode and not found.doing:
        parts.append("![Generation](gpu.png)")
    for table in tables(found):
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        cells = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        parts.append(f"## {table.title}\n\n{cells}")
    return "\n\n".join(parts) + "\n"


def text(found: Findings) -> str:
    return "\n\n".join("\n".join([table.title, *_aligned([table.columns, *table.rows])]) for table in tables(found))


def _aligned(lines: Rows) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _table(title: str, columns: str, rows: Iterable[Sequence[str]]) -> Table:
    """Rows as cells: texts of others, such as errors, may contain bars."""
    return Table([column.strip() for column in columns.split("|")], list(rows), title)


def _tried(one: Tried) -> Sequence[str]:
    ended = one.ended if one.absent or one.ended == RUNS else f"**{_brief(one.ended)}**"
    first, fastest = short(one.first) if one.first else "", short(one.fastest * 1e3) if one.fastest else ""
    return (one.kernel, one.place, ended, first, fastest)


def _checks(found: Findings) -> Rows:
    return [(check.name, "holds" if check.passed else "**DOES NOT HOLD**", check.detail) for check in found.checks]


def _memory(found: Findings) -> Rows:
    return [
        (one.phase, *(f"{size / (1 << 30):.2f}" for size in (one.allocated, one.reserved, one.free)))
        for one in found.memory
    ]


def _device(found: Findings) -> Rows:
    rates, rows = found.rates, []
    if rates is not None:
        rows.append(("copy, read and written", f"{short(rates.copy_bytes_per_second / 1e9)} GB/s"))
        rows.append(("matrix product", f"{short(rates.flops_per_second / 1e12)} TFLOP/s"))
    for shape, choices in found.choices.items():
        rows.append((f"engine, {shape}", ", ".join(f"{name} {value}" for name, value in choices.items())))
    return rows


def _decode(found: Findings) -> Rows:
    rates = found.rates
    return [
        (
            f"{one.shape}, {one.mode}",
            str(one.batch),
            str(one.context),
            *map(short, (one.step_seconds * 1e3, one.tokens_per_second, one.bytes_per_second / 1e9)),
            "" if rates is None else f"{one.bytes_per_second / rates.copy_bytes_per_second:.0%}",
        )
        for one in found.decode
    ]


def _context(found: Findings) -> Rows:
    rates = found.rates
    return [
        (
            one.shape,
            f"{one.prompts} × {one.prompt_tokens}",
            *map(short, (one.tokens_per_second, one.flops_per_second / 1e12)),
            "" if rates is None else f"{one.flops_per_second / rates.flops_per_second:.0%}",
        )
        for one in found.context
    ]


def _gaps(found: Findings) -> Rows:
    return [
        (
            f"{one.shape}, {one.mode}, {'overlap' if one.overlap else 'no overlap'}",
            str(one.batch),
            *(short(seconds * 1e6) for seconds in (one.step_seconds, one.idle_seconds, one.longest_seconds)),
        )
        for one in found.gaps
    ]


def _side_by_side(found: Findings) -> Rows:
    best: dict[tuple[str, int], float] = {}
    for one in found.throughput:
        best[one.shape, one.batch] = max(best.get((one.shape, one.batch), 0.0), one.tokens_per_second)
    return [
        (
            f"{one.shape}, {one.system}",
            str(one.batch),
            f"{one.prompt_tokens} in, {one.output_tokens} out",
            short(one.tokens_per_second),
            f"{one.tokens_per_second / best[one.shape, one.batch]:.2f}",
        )
        for one in sorted(found.throughput, key=lambda one: (one.shape, one.batch))
    ]


def _brief(why: str) -> str:
    return " ".join(why.split())[:300]


def _last(trace: str) -> str:
    return _brief(trace.strip().splitlines()[-1])
