"""What a step costs beside the model."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from bench.parts.scheduler import Costs, Point, Result
from bench.sections.scheduler import LIMIT, LIMIT_AT
from bench.style import BLUE, INK, ORANGE, SOFT, TEAL, canvas, note, short, title

COLOURS = {"max_utilization": BLUE, "guaranteed_no_evict": TEAL, "static_batch": ORANGE}


def of_scheduler(result: Result) -> Figure:
    """Scheduling on the left, the whole step on the right, over the number of sequences."""
    figure, grid = canvas(
        1,
        2,
        (12, 5.2),
        "What a step costs beside the model",
        "Median µs of a step by the number of sequences that generate. Full: nobody waits; dashed: "
        f"{max(point.waiting for point in result.points):,} requests wait as well.",
    )
    top = max(point.costs.whole for point in result.points)
    for axes, name, whole in ((grid[0][0], "Scheduling", False), (grid[0][1], "The whole step", True)):
        for policy, colour in COLOURS.items():
            for waiting in sorted({point.waiting for point in result.points}):
                _line(axes, result.of(policy, waiting), colour, policy.upper(), whole)
        _frame(axes, result, name, top)
    _limit(grid[0][0])
    grid[0][0].legend(loc="upper left", frameon=False, fontsize=8)
    return figure


def _line(axes: Axes, points: list[Point], colour: str, name: str, whole: bool) -> None:
    sizes = [point.running for point in points]
    times = [_time(point.costs, whole) for point in points]
    waits = points[0].waiting > 0
    style = "o--" if waits else "o-"
    axes.plot(sizes, times, style, color=colour, linewidth=1.8, markersize=5, label=None if waits else name)
    if not waits and colour == BLUE:
        for size, spent in zip(sizes, times, strict=True):
            note(axes, short(spent), (size, spent), (6, -10), ha="left", color=INK)


def _time(costs: Costs, whole: bool) -> float:
    return costs.whole if whole else costs.schedule


def _frame(axes: Axes, result: Result, name: str, top: float) -> None:
    sizes = sorted({point.running for point in result.points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(sizes[0] * 0.8, sizes[-1] * 1.9)
    axes.set_ylim(min(point.costs.schedule for point in result.points) * 0.7, top * 1.6)
    axes.set_xlabel("sequences that generate")
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    title(axes, name, "µs of a step")


def _limit(axes: Axes) -> None:
    axes.plot([LIMIT_AT], [LIMIT], "v", color=SOFT, markersize=7)
    note(axes, "limit at 256: 1 ms", (LIMIT_AT, LIMIT), (0, 6), ha="right", color=SOFT)
