"""Pauses quiet and disturbed, and memory over a soak."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.deaths.result import Result
from bench.stats import percentile
from bench.style import BLUE, FAINT, GREY, ORANGE, SOFT, TEAL, canvas, note, short, title

COLOURS = {"router": BLUE, "engine": ORANGE, "detok": TEAL}
NAMES = {"router": "routers", "engine": "engines", "detok": "detokenizers"}
LEAST_SECONDS = 1e-3


def of_deaths(result: Result) -> Figure:
    """Distributions of the first token and of the longest pause."""
    figure, grid = canvas(
        1,
        2,
        (12, 4.8),
        "Services die, streams go on",
        f"{_found(result)} Each stream's longest wait, as a distribution.",
    )
    _distribution(grid[0][0], result.quiet_first, result.first, "First token")
    _distribution(grid[0][1], result.quiet_stall, result.stall, "Longest pause")
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


def _distribution(axes: Axes, quiet: Sequence[float], killed: Sequence[float], name: str) -> None:
    for times, colour, which, at in ((quiet, BLUE, "undisturbed", 30), (killed, ORANGE, "services die", 70)):
        if not times:
            continue
        shares = [100 * (i + 1) / len(times) for i in range(len(times))]
        axes.step(np.maximum(times, LEAST_SECONDS), shares, where="post", color=colour, linewidth=2.2)
        told = f"{which}\np50 {short(percentile(times, 50))} s\np99 {short(percentile(times, 99))} s"
        place = (max(percentile(times, at), LEAST_SECONDS), at)
        note(axes, told, place, (8, -4), ha="left", va="top", color=colour, weight="bold")
    axes.set_xscale("log")
    axes.set_xlim(right=4 * max([LEAST_SECONDS, *quiet, *killed]))
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color=FAINT)
    axes.spines["left"].set_visible(False)
    title(axes, name, "% of the streams that waited no longer")


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
