"""How long each service takes to drain and to come back, and how long streams pause."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.restart import GOES_ON, QUIET, RESTARTS, STOPPED, Result
from bench.plots.distribution import BEHIND, Waits, distribution
from bench.sections.restart import MOST_SECONDS
from bench.style import BLUE, FAINT, GREY, ORANGE, SOFT, TEAL, canvas, note, short, title

LOOKS = {QUIET: (GREY, 30), RESTARTS: (ORANGE, 75), STOPPED: (BLUE, 92), GOES_ON: (TEAL, 52)}
"""Colour, and where the name stands."""
ON_BAR = BEHIND | {"facecolor": FAINT, "alpha": 1}


def of_restart(result: Result) -> Figure:
    """Restarts on the left, pauses on the right."""
    disturbed = [phase for phase in result.phases if phase.name != QUIET]
    streams, failed, wrong = (
        sum(getattr(phase, name) for phase in disturbed) for name in ("streams", "failed", "wrong")
    )
    figure, grid = canvas(
        1,
        2,
        (12, 4.8),
        "Services are restarted, an engine stands still, streams go on",
        f"{streams:,} streams, {failed} failed, {wrong} wrong. Each stream's longest wait, as a distribution.",
    )
    _restarts(grid[0][0], result)
    kinds = [Waits(phase.name, phase.stall, *LOOKS[phase.name]) for phase in result.phases]
    distribution(grid[0][1], "Longest pause", kinds)
    return figure


def _restarts(axes: Axes, result: Result) -> None:
    names = [restart.service for restart in result.restarts]
    drains = [restart.drain for restart in result.restarts]
    backs = [restart.back for restart in result.restarts]
    axes.barh(names, drains, 0.6, color=ORANGE, label="drains")
    axes.barh(names, backs, 0.6, left=drains, color=FAINT, label="begins again")
    for name, drain in zip(names, drains, strict=True):
        note(axes, f"{short(drain)} s", (drain, names.index(name)), (4, 0), ha="left", va="center", bbox=ON_BAR)
    axes.axvline(MOST_SECONDS, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
    axes.set_xlim(0, 1.1 * max(MOST_SECONDS, *(drain + back for drain, back in zip(drains, backs, strict=True))))
    axes.set_ylim(len(names) - 0.4, -1.4)
    axes.set_xlabel("seconds")
    axes.spines["left"].set_visible(False)
    axes.legend(loc="upper right", ncols=2, frameon=False)
    title(axes, "Rolling restart", f"a drain is to take less than {MOST_SECONDS:g} s")
