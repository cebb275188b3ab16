"""How long streams had to wait, as distributions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from bench.stats import percentile
from bench.style import FAINT, note, short, title

LEAST_SECONDS = 1e-3
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
"""So that names are read where they lie on lines."""


class Waits(NamedTuple):
    """Of one kind of streams."""

    name: str
    times: Sequence[float]
    """Seconds, sorted."""
    colour: str
    at: float
    """Percent at which the name stands."""


def distribution(axes: Axes, name: str, kinds: Sequence[Waits]) -> None:
    """One line each."""
    for kind in kinds:
        times = kind.times
        if not times:
            continue
        shares = [100 * (i + 1) / len(times) for i in range(len(times))]
        axes.step(np.maximum(times, LEAST_SECONDS), shares, where="post", color=kind.colour, linewidth=2.2)
        told = f"{kind.name}\np50 {short(percentile(times, 50))} s\np99 {short(percentile(times, 99))} s"
        place = (max(percentile(times, kind.at), LEAST_SECONDS), kind.at)
        style = {"ha": "left", "va": "top", "color": kind.colour, "weight": "bold", "bbox": BEHIND}
        note(axes, told, place, (8, -4), **style)
    axes.set_xscale("log")
    axes.set_xlim(right=4 * max([LEAST_SECONDS, *(time for kind in kinds for time in kind.times)]))
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color=FAINT)
    axes.spines["left"].set_visible(False)
    title(axes, name, "% of the streams that waited no longer")
