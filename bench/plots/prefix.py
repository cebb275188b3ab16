"""First token with and without a cached prefix."""

from matplotlib.figure import Figure

from bench.parts.prefix import Result
from bench.style import BLUE, ORANGE, canvas, note, short, title


def of_prefix(result: Result) -> Figure:
    """First-token time over prompt length."""
    figure, grid = canvas(
        1,
        1,
        (8, 4.6),
        "A cached prefix is not computed again",
        f"First-token time through the ring, one stream, with {result.share:.0%} of the prompt cached and with none.",
    )
    axes = grid[0][0]
    tokens = [point.prompt_tokens for point in result.points]
    for times, colour, name in (
        ([point.cold for point in result.points], ORANGE, "cold"),
        ([point.cached for point in result.points], BLUE, f"{result.share:.0%} cached"),
    ):
        axes.plot(tokens, times, "o-", color=colour, linewidth=2.2, markersize=7)
        note(axes, name, (tokens[-1], times[-1]), (10, 0), ha="left", va="center", color=colour, weight="bold", size=9)
    for point in result.points:
        note(axes, f"{short(point.cold)} ms", (point.prompt_tokens, point.cold), (0, 9))
        cached = f"{short(point.cached)} ms\n{point.ratio:.1f}×"
        note(axes, cached, (point.prompt_tokens, point.cached), (0, -9), va="top")
    highest = max(point.cold for point in result.points)
    axes.set_ylim(-0.16 * highest, 1.12 * highest)
    axes.set_xlim(min(tokens) * 0.5, max(tokens) * 1.16)
    axes.set_xticks(tokens)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.12 * highest])
    axes.set_xlabel("prompt tokens")
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    title(axes, "First token, ms")
    return figure
