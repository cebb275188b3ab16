"""The style of all plots: few colours, light lines, numbers next to their bars and points."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.harness.memory import Trail
from bench.harness.tables import short
from sluice.loadgen.report import percentile

INK = "#1f2933"
SOFT = "#7b8794"
FAINT = "#e4e7eb"
GREY = "#a7b1bd"
BLUE = "#2563eb"
ORANGE = "#f08c2e"
TEAL = "#0f9d8a"
ROLES = {"router": BLUE, "engine": ORANGE, "detok": TEAL}
DPI = 144

STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": FAINT,
    "text.color": INK,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.color": SOFT,
    "ytick.major.size": 0,
}

LEGEND: Any = {"facecolor": "white", "edgecolor": "none", "framealpha": 0.8, "fontsize": 8}


class Series(NamedTuple):
    name: str
    colour: Any
    values: Sequence[float]
    line: str = "o-"


def canvas(
    shape: tuple[int, int], size: tuple[float, float], title: str, subtitle: str, widths: Sequence[float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `size` inches with a title and a grid of axes of `shape` (rows, columns). Needs no display."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(*shape, squeeze=False, width_ratios=widths)
        room = 0.62 / size[1]
        figure.get_layout_engine().set(rect=(0.005, 0.01, 0.99, 0.98 - room), w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        figure.text(0.012, 1 - 0.1 / size[1], title, size=14, weight="bold", va="top")
        figure.text(0.012, 1 - 0.4 / size[1], subtitle, size=9.5, color=SOFT, va="top")
    return figure, [list(row) for row in axes]


def frame(axes: Axes, heading: str = "", below: str = "", *, x: str = "", grid: str = "", bare: str = "left") -> None:
    """Heading, softer line `below` it, label of the x axis, light `grid`; removes the spine `bare`."""
    if heading:
        axes.set_title(f"{heading}\n" if below else heading, loc="left", size=10.5, weight="bold", color=INK, pad=8)
    if below:
        axes.annotate(below, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", size=8.5, color=SOFT)
    if x:
        axes.set_xlabel(x)
    if grid:
        axes.grid(axis=grid, color=FAINT)  # type: ignore[arg-type]
    axes.spines[bare].set_visible(False)


def note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    look: dict[str, Any] = {"ha": "center", "size": 8, "color": INK} | style
    axes.annotate(text, at, shift, textcoords="offset points", **look)


def dashed(axes: Axes, at: float, text: str = "") -> None:
    """A dashed vertical line, labelled at its foot."""
    axes.axvline(at, color=SOFT, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
    note(axes, text, (at, 0.02), (4, 0), xycoords=("data", "axes fraction"), ha="left", color=SOFT)


def lines(axes: Axes, at: Sequence[float], series: Sequence[Series]) -> None:
    """One line per series, with a labelled point at each x value in `at`."""
    for one in series:
        axes.plot(at, one.values, one.line, color=one.colour, linewidth=2, markersize=6, label=one.name)
        for x, value in zip(at, one.values, strict=True):
            note(axes, short(value), (x, value), (0, 7), color=one.colour)
    axes.set_xticks(at, [f"{x:,g}" for x in at])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.legend(**LEGEND)


def bars(axes: Axes, names: Sequence[str], series: Sequence[Series], *, stacked: bool = False) -> None:
    """A group of bars per name, one bar per series: side by side, or percentages stacked to 100."""
    width = 0.8 / (1 if stacked else len(series))
    below = np.zeros(len(names))
    for i, one in enumerate(series):
        at = np.arange(len(names)) + (0 if stacked else (i - (len(series) - 1) / 2) * width)
        axes.bar(at, one.values, 0.94 * width, below, color=one.colour, label=one.name)
        for x, value, low in zip(at, one.values, below, strict=True):
            if not stacked or value > 5:
                note(axes, short(value), (x, low + value), (0, -9 if stacked else 2))
        below = below + one.values if stacked else below
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([])
    axes.margins(y=0.25)
    axes.legend(loc="upper center", ncols=len(series), columnspacing=1, handlelength=1, **LEGEND)


def ranks(axes: Axes, names: Sequence[str], values: Sequence[float], colour: Any, texts: Sequence[str]) -> None:
    """Horizontal bars from top to bottom, each with a text at its end; `colour` is one colour or one per bar."""
    axes.barh(range(len(names)), values, 0.66, color=colour)
    for row, (value, text) in enumerate(zip(values, texts, strict=True)):
        note(axes, text, (value, row), (5, 0), ha="left", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.margins(x=0.3)


def distribution(axes: Axes, heading: str, unit: str, series: Sequence[Series], scale: str = "log") -> None:
    for one in series:
        if one.values:
            percents = [100 * (i + 1) / len(one.values) for i in range(len(one.values))]
            p50, p99 = (short(percentile(one.values, percent)) for percent in (50, 99))
            label = f"{one.name}: p50 {p50}, p99 {p99} {unit}"
            times = np.maximum(one.values, 1e-3)  # The logarithmic scale needs positive values.
            axes.step(times, percents, where="post", color=one.colour, linewidth=2.2, label=label)
    axes.set_xscale(scale)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2, **LEGEND)
    frame(axes, heading, "% of waits that were not longer", x=unit, grid="x")


def trails(axes: Axes, shown: Sequence[Trail]) -> None:
    for trail in shown:
        axes.plot([at / 60 for at in trail.seconds], trail.mebibytes, color=ROLES[trail.role], linewidth=1.8)
    axes.set_ylim(0, 1.25 * max((size for trail in shown for size in trail.mebibytes), default=1.0))
