"""Engine alone and through the ring."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from bench.parts.ring import Point, Points, Result
from bench.stats import Figures
from bench.style import BLUE, GREY, ORANGE, SOFT, TEAL, canvas, note, short, title

WIDTH = 0.36
PROCESSES = {
    "engine": (BLUE, "engine"),
    "router": (TEAL, "router"),
    "detok": (ORANGE, "detokenizers"),
    "client": (GREY, "client"),
}


def of_ring(result: Result) -> Figure:
    """A row per model: throughput, both latencies, CPU time by process."""
    figure, grid = canvas(
        len(result.models),
        4,
        (14, 0.8 + 3.2 * len(result.models)),
        "What the ring costs",
        "Grey: the engine driven in process. Blue: the same engine behind router, detokenizers and gRPC.",
    )
    for axes, points in zip(grid, result.models, strict=True):
        _rates(axes[0], points)
        _latency(axes[1], points.points, "First token", lambda f: (f.first_token_p50, f.first_token_p99))
        _latency(axes[2], points.points, "Between two deltas", lambda f: (f.inter_token_p50, f.inter_token_p99))
        _cpu(axes[3], points.points)
    return figure


def _rates(axes: Axes, points: Points) -> None:
    for i, point in enumerate(points.points):
        for shift, figures, colour in ((-WIDTH / 2, point.alone, GREY), (WIDTH / 2, point.ring, BLUE)):
            rate = figures.tokens_per_second
            axes.bar(i + shift, rate, WIDTH * 0.94, color=colour)
            note(axes, short(rate), (i + shift, rate), (0, 2))
        note(axes, f"{point.ratio:.0%}", (i, 0), (0, -28), xycoords=("data", "axes fraction"), size=10, weight="bold")
    _streams(axes, points.points)
    axes.set_xlabel("of the engine alone", labelpad=21, color=SOFT)
    title(axes, points.title, "output tokens per second")
    _bare(axes)
    axes.margins(y=0.12)


def _latency(
    axes: Axes, points: Sequence[Point], heading: str, times: Callable[[Figures], tuple[float | None, float | None]]
) -> None:
    for i, point in enumerate(points):
        for side, figures, colour in ((-1, point.alone, GREY), (1, point.ring, BLUE)):
            at = i + 0.12 * side
            middle, high = times(figures)
            if middle is None or high is None:
                continue
            axes.plot([at, at], [middle, high], color=colour, linewidth=2, alpha=0.55)
            axes.plot(at, middle, "o", color=colour, markersize=7)
            axes.plot(at, high, "_", color=colour, markersize=8, markeredgewidth=2)
            note(axes, short(middle), (at, middle), (side * 7, 0), ha="right" if side < 0 else "left", va="center")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.margins(y=0.12)
    title(axes, heading, "ms; ● p50, ─ p99")
    _streams(axes, points)


def _cpu(axes: Axes, points: Sequence[Point]) -> None:
    for i, point in enumerate(points):
        used = point.ring.cpu_per_token
        total, at = sum(used.values()), 0.0
        for process, (colour, name) in PROCESSES.items():
            share = used[process] / total
            axes.bar(i, share, 0.62, at, color=colour, label=name if i == 0 else None)
            if share > 0.06:
                note(axes, short(used[process]), (i, at + share / 2), (0, 0), va="center", color="white")
            at += share
        note(axes, short(total), (i, 1), (0, 3))
    title(axes, "CPU time through the ring", "µs per token, by process")
    _bare(axes)
    axes.set_ylim(0, 1.08)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False, reverse=True)
    _streams(axes, points)


def _streams(axes: Axes, points: Sequence[Point]) -> None:
    counts = [point.shape.streams for point in points]
    axes.set_xticks(range(len(counts)), [f"{count} stream{'s' if count > 1 else ''}" for count in counts])


def _bare(axes: Axes) -> None:
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
