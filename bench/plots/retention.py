"""A system prompt kept by priority."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.retention import PRIORITY, Result
from bench.style import BLUE, GREY, ORANGE, canvas, note, short, title

WIDTH = 0.27


def of_retention(result: Result) -> Figure:
    """Hit rates on the left, first tokens on the right, by the size of the floods."""
    figure, grid = canvas(
        1,
        2,
        (12, 4.6),
        "A system prompt that is kept survives the flood, until its time is over",
        f"{result.system_tokens} tokens in a pool of {result.pool_tokens:,}, priority {PRIORITY} for "
        f"{result.seconds / 3600:g} h; other prompts come between two visits.",
    )
    shares = [(p.plain.before, p.kept.before, p.kept.after) for p in result.points]
    times = [(p.plain.first_token_before, p.kept.first_token_before, p.kept.first_token_after) for p in result.points]
    _bars(grid[0][0], result, [tuple(100 * share for share in row) for row in shares])
    _bars(grid[0][1], result, times)
    title(grid[0][0], "Found in the cache", "% of the system prompt")
    title(grid[0][1], "First token of a visit", "ms")
    grid[0][1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    return figure


def _bars(axes: Axes, result: Result, rows: Sequence[tuple[float, ...]]) -> None:
    names = (("plain", GREY), ("kept", BLUE), ("kept, after its time", ORANGE))
    for i, row in enumerate(rows):
        for place, (value, (name, colour)) in enumerate(zip(row, names, strict=True)):
            at = i + (place - 1) * WIDTH
            axes.bar(at, value, WIDTH * 0.94, color=colour, label=name if i == 0 else None)
            note(axes, short(value), (at, value), (0, 2))
    axes.set_xticks(range(len(rows)), [f"{point.flood:g}" for point in result.points])
    axes.set_xlabel("flood between two visits, in pools")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(y=0.12)
