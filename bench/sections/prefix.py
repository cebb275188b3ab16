"""First token with and without a cached prefix."""

from bench.parts import prefix
from bench.sections.words import Section, Table


def of_prefix(result: prefix.Result) -> Section:
    """Cold and cached."""
    rows = [
        [
            str(point.prompt_tokens),
            str(point.cached_tokens),
            f"{point.cold:.1f}",
            f"{point.cached:.1f}",
            f"**{point.ratio:.1f}×**",
        ]
        for point in result.points
    ]
    longest = result.points[-1]
    return Section(
        "First token with and without a cached prefix",
        f"One stream through the ring; {result.share:.0%} of the prompt were computed by an earlier request. Only "
        "whole blocks are found again.",
        [f"A prompt of {longest.prompt_tokens} tokens gets its first token **{longest.ratio:.1f}×** sooner."],
        [Table(["prompt tokens", "from the cache", "cold, ms", "cached, ms", "sooner"], rows)],
    )
