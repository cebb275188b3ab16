"""What sections are made of."""

from typing import NamedTuple

from bench.stats import Figures


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


def rate(figures: Figures) -> str:
    """Tokens per second, and from where to where."""
    slowest, fastest = figures.tokens_per_second_range
    return f"{number(figures.tokens_per_second)} ({number(slowest)}–{number(fastest)})"


def latencies(figures: Figures) -> list[str]:
    """Two cells: p50 and p99 of first token and inter-token time."""
    return [
        f"{number(figures.first_token_p50)} · {number(figures.first_token_p99)}",
        f"{number(figures.inter_token_p50)} · {number(figures.inter_token_p99)}",
    ]


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def span(values: list[float], form: str) -> str:
    """From the least to the greatest."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
