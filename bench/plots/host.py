"""A second tier in host memory."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.host import Point, Result, Revisits
from bench.style import BLUE, FAINT, ORANGE, SOFT, canvas, note, short, title

SIDES = (("device alone", ORANGE), ("with host tier", BLUE))


def of_host(result: Result) -> Figure:
    """Tokens computed again by working set on the left, first tokens of the set that shows most on the right."""
    figure, grid = canvas(
        1,
        2,
        (12, 4.8),
        "Evicted blocks wait in host memory",
        f"Prompts of {result.prompt_tokens} tokens, revisited in order; a pool of {result.pool_tokens:,} tokens, "
        f"{result.host_tokens:,} more on the host.",
    )
    _recomputed(grid[0][0], result)
    _times(grid[0][1], max(result.points, key=lambda point: (point.saved, point.working_set)))
    return figure


def _of(point: Point) -> tuple[Revisits, Revisits]:
    return point.device, point.host


def _recomputed(axes: Axes, result: Result) -> None:
    sizes = [point.working_set for point in result.points]
    for side, (name, colour) in enumerate(SIDES):
        found = [_of(point)[side] for point in result.points]
        shares = [100 * each.recomputed_tokens / each.prompt_tokens for each in found]
        axes.plot(sizes, shares, "o-", color=colour, linewidth=2.2, markersize=7, label=name)
        for size, share in zip(sizes, shares, strict=True):
            note(axes, f"{short(share)}%", (size, share), (0, 8 if side == 0 else -14), color=colour)
    room = 1 + result.host_tokens / result.pool_tokens
    for at, name in ((1.0, "device full"), (room, "both full")):
        axes.axvline(at, color=SOFT, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        note(axes, name, (at, 0.5), (4, 0), xycoords=("data", "axes fraction"), ha="left", color=SOFT)
    axes.set_ylim(-14, 118)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xlabel("working set, in pools")
    axes.grid(axis="y", color=FAINT)
    axes.spines["left"].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.92), facecolor="white", edgecolor="none", framealpha=1)
    title(axes, "Computed again", "% of the prompt tokens of revisits")


def _times(axes: Axes, point: Point) -> None:
    for side, (name, colour) in enumerate(SIDES):
        times = _of(point)[side].times
        shares = [(i + 1) / len(times) * 100 for i in range(len(times))]
        axes.step(times, shares, where="post", color=colour, linewidth=2.2)
        middle = times[len(times) // 2]
        note(axes, f"{name}: {short(middle)} ms", (middle, 50), (8, -4), ha="left", color=colour, weight="bold")
    axes.set_xlim(0, 1.25 * max(point.device.times[-1], point.host.times[-1]))
    axes.set_xlabel("first token, ms")
    axes.grid(axis="x", color=FAINT)
    axes.spines["left"].set_visible(False)
    title(axes, f"First token at {point.working_set:g} pools", "% of the revisits that have theirs")
