"""Neighbours of a client that reads nothing, and memory meanwhile."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.slow_reader import Result
from bench.style import BLUE, FAINT, GREY, ORANGE, SOFT, TEAL, canvas, note, short, title

COLOURS = {"router": BLUE, "engine": ORANGE, "detok": TEAL}
BELOW = {"router": False, "engine-0": False, "detok-0": True}
"""Whose name is written, and whether under its line."""


def of_slow_reader(result: Result) -> Figure:
    """Speeds by round on the left, memory on the right."""
    figure, grid = canvas(
        1,
        2,
        (12, 4.8),
        "One client reads nothing, the others do not notice",
        f"{result.neighbours} neighbours have {result.ratio:.1%} of their speed; its stream pauses once "
        f"{result.undelivered_tokens} tokens wait.",
        widths=(1, 1.4),
    )
    _speeds(grid[0][0], result)
    _memory(grid[0][1], result)
    return figure


def _speeds(axes: Axes, result: Result) -> None:
    rounds = range(1, len(result.without) + 1)
    for speeds, shift, colour, name in (
        (result.without, -0.18, GREY, "all read"),
        (result.beside, 0.18, BLUE, "one reads nothing"),
    ):
        axes.bar([at + shift for at in rounds], speeds, 0.34, color=colour, label=name)
    axes.set_ylim(0, 1.25 * max(*result.without, *result.beside))
    axes.set_xticks(list(rounds))
    axes.set_xlabel("round")
    axes.grid(axis="y", color=FAINT)
    axes.spines["left"].set_visible(False)
    axes.legend(loc="upper right", ncols=2, frameon=False)
    title(axes, "Tokens per second", "all neighbours together")


def _memory(axes: Axes, result: Result) -> None:
    highest = 0.0
    for trail in result.memory:
        minutes = [at / 60 for at in trail.seconds]
        axes.plot(minutes, trail.mebibytes, color=COLOURS[trail.role], linewidth=2)
        told = f"{trail.service} {short(trail.mebibytes[-1])}"
        if trail.service in BELOW:
            place = (-2, -12 if BELOW[trail.service] else 6)
            note(axes, told, (minutes[-1], trail.mebibytes[-1]), place, ha="right", color=COLOURS[trail.role])
        highest = max(highest, *trail.mebibytes)
    axes.axvline(result.slow_from / 60, color=SOFT, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
    note(axes, "nothing is read from here on", (result.slow_from / 60, 1.15 * highest), (-4, 0), ha="right", color=SOFT)
    axes.set_ylim(0, 1.25 * highest)
    axes.set_xlabel("minutes")
    axes.grid(axis="y", color=FAINT)
    axes.spines["left"].set_visible(False)
    title(axes, "Memory, MiB")
