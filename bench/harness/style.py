"""The look of all pictures: few colours, light lines, numbers beside what they belong to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.harness.memory import Trail
from bench.harness.stats import percentile
from bench.harness.tables import short

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

LEAST_SECONDS = 1e-3
"""Left end of a logarithmic axis of waits."""
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
"""A box that keeps text readable on top of lines."""


def canvas(
    shape: tuple[int, int], size: tuple[float, float], title: str, subtitle: str, widths: Sequence[float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `size` inches with a grid of axes, (rows, columns), under a title; relative `widths` of the columns.
    Needs no display."""
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
    """Heading with a softer line below it, label, light grid, and one spine less: `bare`."""
    if heading:
        axes.set_title(f"{heading}\n" if below else heading, loc="left", size=10.5, weight="bold", color=INK, pad=8)
    if below:
        axes.annotate(below, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", size=8.5, color=SOFT)
    if x:
        axes.set_xlabel(x)
    if grid:
        axes.grid(axis=grid, color=FAINT)  # type: ignore[arg-type]
    if bare:
        axes.spines[bare].set_visible(False)


def note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    """Text beside a point of the data; `shift` in points."""
    look: dict[str, Any] = {"ha": "center", "size": 8, "color": INK} | style
    axes.annotate(text, at, shift, textcoords="offset points", **look)


def right(axes: Axes, text: str, at: tuple[float, float], **style: Any) -> None:
    """Text at the right end of a horizontal bar."""
    note(axes, text, at, (4, 0), **{"ha": "left", "va": "center", **style})


def dashed(axes: Axes, at: float, **style: Any) -> None:
    axes.axvline(at, color=SOFT, linewidth=1, linestyle=(0, (3, 3)), **style)


def shares(axes: Axes, times: Sequence[float], colour: str, least: float = 0.0) -> None:
    """Cumulative distribution of sorted times, in percent; times below `least` are drawn there."""
    percents = [100 * (i + 1) / len(times) for i in range(len(times))]
    axes.step(np.maximum(times, least), percents, where="post", color=colour, linewidth=2.2)


class Waits(NamedTuple):
    """Of one kind of streams."""

    name: str
    times: Sequence[float]
    """Seconds, sorted."""
    colour: str
    at: float
    """Percent at which the name is written."""


def distribution(axes: Axes, name: str, kinds: Sequence[Waits]) -> None:
    """Cumulative distributions over seconds, on a logarithmic axis."""
    for kind in kinds:
        times = kind.times
        if not times:
            continue
        shares(axes, times, kind.colour, LEAST_SECONDS)
        text = f"{kind.name}\np50 {short(percentile(times, 50))} s\np99 {short(percentile(times, 99))} s"
        place = (max(percentile(times, kind.at), LEAST_SECONDS), kind.at)
        note(axes, text, place, (8, -4), ha="left", va="top", color=kind.colour, weight="bold", bbox=BEHIND)
    axes.set_xscale("log")
    axes.set_xlim(right=4 * max([LEAST_SECONDS, *(time for kind in kinds for time in kind.times)]))
    frame(axes, name, "% of the streams that waited no longer", x="seconds", grid="x")


def trails(axes: Axes, shown: Sequence[Trail], linewidth: float) -> float:
    """Memory over minutes, coloured by role. Returns the highest value, in MiB."""
    for trail in shown:
        axes.plot([at / 60 for at in trail.seconds], trail.mebibytes, color=ROLES[trail.role], linewidth=linewidth)
    return max((size for trail in shown for size in trail.mebibytes), default=0.0)
