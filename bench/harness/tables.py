"""Numbers and tables as text, the same on a page and on a terminal."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A table whose first column names the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


class Section(NamedTuple):
    """The part of a page about one topic."""

    title: str
    question: str
    answers: list[str]
    tables: list[Table]


def table(columns: str, rows: Iterable[str]) -> Table:
    """A table from lines of cells that are separated by bars: the header, and the rows."""
    return Table(_cells(columns), [_cells(row) for row in rows])


def markdown(table: Table, others: str = "---:") -> str:
    """`others` is the alignment of all columns except the first."""
    lines = [table.columns, ["---", *[others for _ in table.columns[1:]]], *table.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


def short(value: float) -> str:
    """Three significant digits, without trailing zeros."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float | None) -> str:
    """At least three significant digits, with trailing zeros so that columns align; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def numbers(*values: float | None) -> str:
    return " · ".join(map(number, values))


def span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
