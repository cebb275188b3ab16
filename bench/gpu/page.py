"""Findings as tables: for a terminal, and for docs/measurements."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.gpu.findings import RUNS, Findings
from bench.gpu.goals import goals


class Table(NamedTuple):
    """Rows of cells; the first column is what the row is about."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(found: Findings) -> list[Table]:
    """Those that have rows."""
    made = [_facts(found), _goals(found), _device(found), _tried(found), _checks(found), _blamed(found), _memory(found)]
    made += [_decode(found), _context(found), _gaps(found), _peers(found)]
    made.append(Table("Skipped", ("what", "why"), [(name, _short(why)) for name, why in found.skipped.items()]))
    made.append(Table("Failed", ("what", "how"), [(name, _last(text)) for name, text in found.failed.items()]))
    return [table for table in made if table.rows]


def markdown(found: Findings) -> str:
    """A page."""
    origin = "; ".join(f"{name} {value}" for name, value in found.origin.items() if name != "command")
    command = found.origin.get("command", "python -m bench.gpu")
    parts = [f"# The GPU engine, measured\n\n`{command}`: {origin}. Data: [gpu.json](gpu.json)."]
    parts += found.notes
    if found.doing:
        parts.append(f"Not through: it was at *{found.doing}* when this was written.")
    if found.decode and not found.doing:
        parts.append("![Generation](gpu.png)")
    for table in tables(found):
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        cells = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        parts.append(f"## {table.title}\n\n{cells}")
    return "\n\n".join(parts) + "\n"


def text(found: Findings) -> str:
    """For a terminal."""
    return "\n\n".join("\n".join([table.title, *_aligned([table.columns, *table.rows])]) for table in tables(found))


def _aligned(lines: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _facts(found: Findings) -> Table:
    return Table("The machine", ("what", "found"), list(found.facts.items()))


def _tried(found: Findings) -> Table:
    rows = [
        (
            one.kernel,
            one.place,
            one.ended if one.absent or one.ended == RUNS else f"**{_short(one.ended)}**",
            _number(one.first) if one.first else "",
            _number(one.fastest * 1e3) if one.fastest else "",
        )
        for one in found.tried
    ]
    columns = ("kernel, in a process of its own", "heads", "", "first, s", "fastest, ms")
    return Table("Kernels", columns, rows)


def _blamed(found: Findings) -> Table:
    return Table("At fault", ("check", "layer, and what was tried"), list(found.blamed.items()))


def _memory(found: Findings) -> Table:
    rows = [
        (one.phase, *(f"{size / (1 << 30):.2f}" for size in (one.allocated, one.reserved, one.free)))
        for one in found.memory
    ]
    return Table("Memory of the default path, GiB", ("after", "tensors", "torch's", "free"), rows)


def _device(found: Findings) -> Table:
    rates, rows = found.rates, []
    if rates is not None:
        rows = [
            ("copy, read and written", f"{_number(rates.copy_bytes_per_second / 1e9)} GB/s"),
            ("matrix product", f"{_number(rates.flops_per_second / 1e12)} TFLOP/s"),
        ]
    for shape, choices in found.choices.items():
        rows.append((f"engine, {shape}", ", ".join(f"{name} {value}" for name, value in choices.items())))
    return Table("The device", ("what", "found"), rows)


def _checks(found: Findings) -> Table:
    rows = [(check.name, "holds" if check.passed else "**DOES NOT HOLD**", check.detail) for check in found.checks]
    return Table("Checks", ("check", "", "how"), rows)


def _goals(found: Findings) -> Table:
    rows = [(goal.name, goal.wanted, goal.found, "met" if goal.met else "missed") for goal in goals(found)]
    return Table("Goals", ("goal", "wanted", "found", ""), rows)


def _decode(found: Findings) -> Table:
    rates = found.rates
    rows = [
        (
            f"{one.shape}, {one.mode}",
            str(one.batch),
            str(one.context),
            _number(one.step_seconds * 1e3),
            _number(one.tokens_per_second),
            _number(one.bytes_per_second / 1e9),
            "" if rates is None else f"{one.bytes_per_second / rates.copy_bytes_per_second:.0%}",
        )
        for one in found.decode
    ]
    columns = ("generation", "batch", "context", "ms per step", "tokens/s", "GB/s", "of the copy's")
    return Table("Generation, through the engine's loop", columns, rows)


def _context(found: Findings) -> Table:
    rates = found.rates
    rows = [
        (
            one.shape,
            f"{one.prompts} × {one.prompt_tokens}",
            _number(one.tokens_per_second),
            _number(one.flops_per_second / 1e12),
            "" if rates is None else f"{one.flops_per_second / rates.flops_per_second:.0%}",
        )
        for one in found.context
    ]
    columns = ("context", "prompts", "tokens/s", "TFLOP/s", "of the matrix product's")
    return Table("Context, through the engine's loop", columns, rows)


def _gaps(found: Findings) -> Table:
    rows = [
        (
            f"{one.shape}, {one.mode}, {'overlap' if one.overlap else 'no overlap'}",
            str(one.batch),
            _number(one.step_seconds * 1e6),
            _number(one.idle_seconds * 1e6),
            _number(one.longest_seconds * 1e6),
        )
        for one in found.gaps
    ]
    columns = ("steps", "batch", "µs per step", "µs idle per step, profiled", "longest, µs")
    return Table("Gaps between steps", columns, rows)


def _peers(found: Findings) -> Table:
    best = {(one.shape, one.batch): 0.0 for one in found.throughput}
    for one in found.throughput:
        best[one.shape, one.batch] = max(best[one.shape, one.batch], one.tokens_per_second)
    rows = [
        (
            f"{one.shape}, {one.system}",
            str(one.batch),
            f"{one.prompt_tokens} in, {one.output_tokens} out",
            _number(one.tokens_per_second),
            f"{one.tokens_per_second / best[one.shape, one.batch]:.2f}",
        )
        for one in sorted(found.throughput, key=lambda one: (one.shape, one.batch))
    ]
    columns = ("side by side", "requests", "tokens", "output tokens/s", "of the best")
    return Table("Side by side", columns, rows)


def _number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(why: str) -> str:
    return " ".join(why.split())[:300]


def _last(trace: str) -> str:
    return _short(trace.strip().splitlines()[-1])
