"""How all pictures look: few colours, light lines, numbers where the eye is."""

from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK = "#1f2933"
SOFT = "#7b8794"
FAINT = "#e4e7eb"
GREY = "#a7b1bd"
BLUE = "#2563eb"
ORANGE = "#f08c2e"
TEAL = "#0f9d8a"
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


def canvas(
    rows: int,
    columns: int,
    size: tuple[float, float],
    title: str,
    subtitle: str,
    widths: Sequence[float] | None = None,
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `size` inches with a grid of axes under a title; `widths` of the columns. No display is needed."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
        room = 0.62 / size[1]
        figure.get_layout_engine().set(rect=(0.005, 0.01, 0.99, 0.98 - room), w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        figure.text(0.012, 1 - 0.1 / size[1], title, size=14, weight="bold", va="top")
        figure.text(0.012, 1 - 0.4 / size[1], subtitle, size=9.5, color=SOFT, va="top")
    return figure, [list(row) for row in axes]


def title(axes: Axes, text: str, below: str = "") -> None:
    """A heading at the left, and a softer line under it."""
    axes.set_title(f"{text}\n" if below else text, loc="left", size=10.5, weight="bold", color=INK, pad=8)
    if below:
        axes.annotate(below, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", size=8.5, color=SOFT)


def note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    """Text beside a point of the data; `shift` in points."""
    look: dict[str, Any] = {"ha": "center", "size": 8, "color": INK} | style
    axes.annotate(text, at, shift, textcoords="offset points", **look)


def short(value: float) -> str:
    """A number for a label: three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
