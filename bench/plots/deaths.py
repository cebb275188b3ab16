"""Pauses quiet and disturbed, and memory over a soak."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.deaths.result import Result
from bench.plots.distribution import Waits, distribution
from bench.style import BLUE, FAINT, GREY, ORANGE, SOFT, TEAL, canvas, title

COLOURS = {"router": BLUE, "engine": ORANGE, "detok": TEAL}
NAMES = {"router": "routers", "engine": "engines", "detok": "detokenizers"}


def of_deaths(result: Result) -> Figure:
    """Distributions of the first token and of the longest pause."""
    figure, grid = canvas(
        1,
        2,
        (12, 4.8),
        "Services die, streams go on",
        f"{_found(result)} Each stream's longest wait, as a distribution.",
    )
    for axes, name, quiet, killed in (
        (grid[0][0], "First token", result.quiet_first, result.first),
        (grid[0][1], "Longest pause", result.quiet_stall, result.stall),
    ):
        distribution(axes, name, [Waits("undisturbed", quiet, BLUE, 30), Waits("services die", killed, ORANGE, 70)])
    return figure


def of_soak(result: Result) -> Figure:
    """Resident memory of every process, one row per role, deaths as lines."""
    roles = [role for role in COLOURS if any(trail.role == role for trail in result.memory)]
    figure, grid = canvas(
        len(roles), 1, (12, 2.2 * len(roles) + 1), "Memory stays where it is", f"{_found(result)} A line: a death."
    )
    for (axes,), role in zip(grid, roles, strict=True):
        _memory(axes, result, role)
    grid[-1][0].set_xlabel("minutes")
    return figure


def _found(result: Result) -> str:
    return f"{len(result.deaths)} kills, {result.streams:,} streams, {result.failed} failed, {result.wrong} wrong."


def _memory(axes: Axes, result: Result, role: str) -> None:
    highest = 0.0
    for trail in (trail for trail in result.memory if trail.role == role):
        axes.plot([at / 60 for at in trail.seconds], trail.mebibytes, color=COLOURS[role], linewidth=1.6)
        highest = max(highest, *trail.mebibytes)
    for death in result.deaths:
        own = death.role == role
        axes.axvline(
            (death.at + result.quiet_seconds) / 60, color=GREY if own else FAINT, linewidth=1 if own else 0.8, zorder=0
        )
    axes.axvline(result.quiet_seconds / 60, color=SOFT, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
    axes.set_ylim(0, 1.2 * highest)
    axes.grid(axis="y", color=FAINT)
    axes.spines["left"].set_visible(False)
    title(axes, f"{NAMES[role].capitalize()}, MiB")
