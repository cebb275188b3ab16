"""In-flight batching and static batches: how the lives of the requests lie."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.policies import BASE, Entry, Life, Outcome, Result
from bench.style import BLUE, FAINT, ORANGE, SOFT, TEAL, canvas, note, short, title

SHOWN = {
    "max_utilization": ("MAX_UTILIZATION", BLUE),
    "guaranteed_no_evict": ("GUARANTEED_NO_EVICT", TEAL),
    BASE: ("STATIC_BATCH", ORANGE),
}


def of_policies(result: Result) -> Figure:
    """A column per mix, a row per policy on one clock."""
    figure, grid = canvas(
        len(SHOWN),
        len(result.outcomes),
        (1 + 4.6 * len(result.outcomes), 7.6),
        "In-flight batching: whoever is done makes room at once",
        f"{result.requests} requests of {result.shortest} to {result.longest} output tokens. A bar is a request, a row "
        "a place in the batch, pale is an empty place.",
    )
    for column, outcome in enumerate(result.outcomes):
        end = max(life.last_token for entry in outcome.entries for life in entry.lives)
        for row, (policy, (name, colour)) in enumerate(SHOWN.items()):
            axes = grid[row][column]
            entry = outcome.of(policy)
            _lives(axes, entry.lives, outcome.mix.batch, colour)
            _head(axes, name, entry, outcome, with_mix=row == 0)
            axes.set_xlim(0, end * 1.02)
        grid[-1][column].set_xlabel("seconds")
    return figure


def _lives(axes: Axes, lives: Sequence[Life], places: int, colour: str) -> None:
    free_at = [0.0] * places
    end = max(life.last_token for life in lives)
    for life in sorted(lives, key=lambda life: life.first_token):
        place = min(range(places), key=free_at.__getitem__)
        start = free_at[place] if free_at[place] else 0.0
        axes.barh(place, life.last_token - max(start, 0.0), 0.7, start, color=FAINT, zorder=0)
        axes.barh(
            place, life.last_token - life.first_token, 0.7, life.first_token, color=colour, edgecolor="white", lw=0.7
        )
        free_at[place] = life.last_token
    axes.barh(range(places), end, 0.7, color=FAINT, zorder=-1)
    axes.axvline(end, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
    note(axes, f"{short(end)} s", (end, 1), (-4, 3), xycoords=("data", "axes fraction"), ha="right", color=SOFT)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _head(axes: Axes, name: str, entry: Entry, outcome: Outcome, with_mix: bool) -> None:
    rate = f"{short(entry.figures.tokens_per_second)} tokens/s"
    ratio = "" if entry.policy == BASE else f" ({entry.ratio:.2f}×)"
    mix = f"{outcome.mix.title}\n\n" if with_mix else ""
    title(axes, f"{mix}{name}: {rate}{ratio}", f"{entry.steps} steps of {short(entry.step_milliseconds)} ms")
