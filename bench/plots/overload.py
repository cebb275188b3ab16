"""How soon the refused know, and one tenant in another's flood."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.overload import Result
from bench.stats import percentile
from bench.style import BLUE, FAINT, GREY, ORANGE, SOFT, TEAL, canvas, note, short, title

LEAST_MS = 0.01
Curve = tuple[str, Sequence[float], str]
"""Name, sorted times, colour."""


def of_overload(result: Result) -> Figure:
    """Distributions."""
    tenants = result.tenants
    figure, grid = canvas(
        1,
        2,
        (12, 4.8),
        "Too much at once",
        f"{result.max_live} live and {result.max_waiting} waiting requests at most; then two tenants, one of which "
        f"floods with {tenants.plan.flood} requests at a time.",
    )
    at_once, *paced = result.bursts
    refusals: list[Curve] = [
        ("in the router", at_once.router, TEAL),
        ("at the client, at once", at_once.client, GREY),
        *((f"in {each.seconds:g} s", each.client, colour) for each, colour in zip(paced, (ORANGE, BLUE), strict=False)),
    ]
    _curves(grid[0][0], refusals)
    title(grid[0][0], f"{at_once.requests:,} requests: the refused know", "% of the refusals")
    _curves(
        grid[0][1],
        [("alone", tenants.alone.first_token, BLUE), ("flood", tenants.flooded.first_token, ORANGE)],
        "linear",
    )
    title(grid[0][1], "The other tenant's first token", "% of its requests")
    return figure


def _curves(axes: Axes, curves: Sequence[Curve], scale: str = "log") -> None:
    longest = LEAST_MS
    for place, (name, times, colour) in enumerate(curves):
        if not times:
            continue
        shares = [100 * (i + 1) / len(times) for i in range(len(times))]
        axes.step(np.maximum(times, LEAST_MS), shares, where="post", color=colour, linewidth=2.2)
        at = 85 - 20 * place
        told = f"{name}\np50 {short(percentile(times, 50))}, p99 {short(percentile(times, 99))} ms"
        note(axes, told, (max(percentile(times, at), LEAST_MS), at), (6, -2), ha="left", va="top", color=colour)
        longest = max(longest, times[-1])
    axes.set_xscale(scale)
    if scale == "log":
        axes.set_xlim(right=6 * longest)
    else:
        axes.set_xlim(0, 1.4 * longest)
    axes.set_xlabel("ms", color=SOFT)
    axes.grid(axis="x", color=FAINT)
    axes.spines["left"].set_visible(False)
