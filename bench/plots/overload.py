"""How soon the refused know, and one tenant in another's flood."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.overload.refusals import Burst
from bench.parts.overload import Result
from bench.stats import percentile
from bench.style import BLUE, FAINT, GREY, INK, ORANGE, SOFT, TEAL, canvas, note, short, title

LEAST_MS = 0.01
ROOM_LOG, ROOM_LINEAR = 200.0, 1.6
"""Right end of the axis over the longest time: the names stand beside the curves."""
CLIENT_COLOURS = (GREY, ORANGE, BLUE, INK)
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
    first = result.bursts[0]
    refusals: list[Curve] = [
        ("in the router", first.router, TEAL),
        *((_name(each), each.client, colour) for each, colour in zip(result.bursts, CLIENT_COLOURS, strict=False)),
    ]
    _curves(grid[0][0], refusals)
    title(grid[0][0], "The refused know", "% of the refusals, at the client")
    _curves(
        grid[0][1],
        [("alone", tenants.alone.first_token, BLUE), ("flood", tenants.flooded.first_token, ORANGE)],
        "linear",
    )
    title(grid[0][1], "The other tenant's first token", "% of its requests")
    return figure


def _name(burst: Burst) -> str:
    return f"{burst.requests:,} {f'in {burst.seconds:g} s' if burst.seconds else 'at once'}"


def _curves(axes: Axes, curves: Sequence[Curve], scale: str = "log") -> None:
    longest = max((times[-1] for _, times, _ in curves if times), default=LEAST_MS)
    axes.set_xscale(scale)
    axes.set_xlim(LEAST_MS if scale == "log" else 0, (ROOM_LOG if scale == "log" else ROOM_LINEAR) * longest)
    for place, (name, times, colour) in enumerate(curves):
        if not times:
            continue
        shares = [100 * (i + 1) / len(times) for i in range(len(times))]
        axes.step(np.maximum(times, LEAST_MS), shares, where="post", color=colour, linewidth=2.2)
        told = f"{name}\np50 {short(percentile(times, 50))}, p99 {short(percentile(times, 99))} ms"
        note(axes, told, (longest, 98 - 18 * place), (14, 0), ha="left", va="top", color=colour)
    axes.set_xlabel("ms", color=SOFT)
    axes.grid(axis="x", color=FAINT)
    axes.spines["left"].set_visible(False)
