"""In-flight and static batching: how the lives of the requests lie."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.batching import Life, Result
from bench.plots.style import BLUE, FAINT, INK, ORANGE, SOFT, canvas, note, short, title
from bench.stats import Figures


def of_batching(result: Result) -> Figure:
    """One above the other on the same clock."""
    figure, grid = canvas(
        2,
        1,
        (10, 6.6),
        f"In-flight batching: {result.ratio:.2f} times the tokens per second",
        f"{result.requests} requests of {result.shortest} to {result.longest} output tokens, {result.width} at a time, "
        "through the ring. A bar is a request, a row a place in the batch, pale is an empty place.",
    )
    end = max(life.last_token for life in [*result.static_lives, *result.in_flight_lives])
    for (axes,), lives, figures, name, colour in (
        (grid[0], result.in_flight_lives, result.in_flight, "In flight", BLUE),
        (grid[1], result.static_lives, result.static, "Static", ORANGE),
    ):
        _lives(axes, lives, colour)
        _name(axes, name, lives, figures)
        axes.set_xlim(0, end * 1.01)
    grid[1][0].set_xlabel("seconds")
    return figure


def _lives(axes: Axes, lives: Sequence[Life], colour: str) -> None:
    free_at: list[float] = []
    busy_until = max(life.last_token for life in lives)
    for life in sorted(lives, key=lambda life: life.submitted):
        place = next((i for i, at in enumerate(free_at) if at <= life.submitted), len(free_at))
        free_at[place : place + 1] = [life.last_token]
        axes.barh(
            place, life.last_token - life.submitted, 0.62, life.submitted, color=colour, edgecolor="white", linewidth=1
        )
        axes.barh(place, life.first_token - life.submitted, 0.62, life.submitted, color=INK, alpha=0.35)
    axes.barh(range(len(free_at)), busy_until, 0.62, color=FAINT, zorder=0)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _name(axes: Axes, name: str, lives: Sequence[Life], figures: Figures) -> None:
    took = max(life.last_token for life in lives)
    title(axes, f"{name}: {short(figures.tokens_per_second)} tokens/s")
    axes.axvline(took, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
    note(axes, f"{took:.1f} s", (took, 1), (-4, 3), xycoords=("data", "axes fraction"), ha="right", color=SOFT)
