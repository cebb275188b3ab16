"""A long prompt among others: who waits for it."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.parts.chunked import Entry, Episode, Result
from bench.style import BLUE, FAINT, GREY, ORANGE, SOFT, canvas, note, short, title

BEFORE = 60.0
"""Milliseconds that are shown before the long prompt comes."""


def of_chunked(result: Result) -> Figure:
    """A row per mode: one run on the left, all of them on the right."""
    figure, grid = canvas(
        len(result.entries),
        3,
        (13.5, 1.2 + 2.5 * len(result.entries)),
        f"A prompt of {result.context_tokens:,} tokens comes",
        f"Grey ticks: tokens of {result.streams} running streams. Orange: the long prompt until its first token. Blue: "
        "newcomers with short prompts, from their arrival to their first token.",
        widths=[3.4, 1, 1],
    )
    end = 1000 * 1.08 * max(_end(entry.episode) for entry in result.entries)
    slowest = max(entry.newcomer_p99 for entry in result.entries)
    widest = max(entry.stream_p99 for entry in result.entries)
    for row, entry in zip(grid, result.entries, strict=True):
        _episode(row[0], entry, end)
        last = entry is result.entries[-1]
        head = entry is result.entries[0]
        _pair(row[1], entry.newcomer_p50, entry.newcomer_p99, slowest, BLUE, "newcomer: first token" if head else "")
        _pair(row[2], entry.stream_p50, entry.stream_p99, widest, GREY, "stream: between tokens" if head else "")
        if last:
            row[0].set_xlabel("milliseconds since the long prompt came")
    return figure


def _end(episode: Episode) -> float:
    return max(arrival.first_token for arrival in [episode.long, *episode.newcomers])


def _episode(axes: Axes, entry: Entry, end: float) -> None:
    episode = entry.episode
    for place, stream in enumerate(episode.streams):
        axes.plot([1000 * at for at in stream], [place] * len(stream), "|", color=SOFT, markersize=6, mew=1.1)
    at = len(episode.streams)
    long = 1000 * episode.long.first_token
    axes.barh(at, long, 0.8, color=ORANGE)
    note(axes, f"{short(long)} ms", (long, at), (4, 0), ha="left", va="center", color=ORANGE, weight="bold")
    for place, arrival in enumerate(episode.newcomers, at + 1):
        came, first = 1000 * arrival.came, 1000 * arrival.first_token
        axes.barh(place, first - came, 0.55, came, color=BLUE)
    axes.axvline(0, color=FAINT, linewidth=1, zorder=0)
    axes.set_xlim(-BEFORE, end)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    title(axes, entry.mode[0].upper() + entry.mode[1:])


def _pair(axes: Axes, middle: float, high: float, widest: float, colour: str, heading: str) -> None:
    for row, (name, value) in enumerate((("p50", middle), ("p99", high))):
        axes.barh(row, value, 0.6, color=colour, alpha=0.55 if name == "p50" else 1)
        note(axes, f"{short(value)} ms", (value, row), (4, 0), ha="left", va="center")
    axes.set_yticks([0, 1], ["p50", "p99"])
    axes.set_ylim(2.2, -1.2)
    axes.set_xlim(0, 1.35 * widest)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    if heading:
        title(axes, heading)
