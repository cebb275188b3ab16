"""Sluice beside transformers."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.peers import Result, Table
from bench.style import BLUE, GREY, canvas, note, short, title
from bench.systems.engine_alone import NAME as ALONE
from bench.systems.through_ring import NAME as RING


def of_peers(result: Result) -> Figure:
    """A column per kind of work."""
    figure, grid = canvas(
        1,
        len(result.tables),
        (1.5 + 4.2 * len(result.tables), 3.2),
        "Beside transformers on the same CPU",
        "Output tokens per second: same checkpoint, requests, greedy sampling and threads. In brackets: by generate.",
    )
    for i, (axes, table) in enumerate(zip(grid[0], result.tables, strict=True)):
        _bars(axes, table, names=i == 0)
    return figure


def _bars(axes: Axes, table: Table, names: bool) -> None:
    for row, entry in enumerate(table.entries):
        rate = entry.figures.tokens_per_second
        colour, alpha = (BLUE if entry.system in (RING, ALONE) else GREY), (0.55 if entry.system == ALONE else 1)
        axes.barh(row, rate, 0.66, color=colour, alpha=alpha)
        weight = "bold" if entry.system == RING else "normal"
        note(axes, f"{short(rate)}  ({entry.ratio:.2f}×)", (rate, row), (5, 0), ha="left", va="center", weight=weight)
    axes.set_yticks(range(len(table.entries)), [entry.system if names else "" for entry in table.entries])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.3)
    head, _, tail = table.work.title.partition(", ")
    title(axes, head, tail)
