"""A run with deaths in a line."""

from bench.deaths.result import Result
from bench.stats import percentile


def told(result: Result) -> str:
    """Kills, streams, and how long they had to wait."""
    killed = ", ".join(f"{count} {role}" for role, count in result.killed.items())
    return (
        f"{len(result.deaths)} kills ({killed}) in {result.seconds:.0f} s: {result.streams} streams, "
        f"{result.failed} failed, {result.wrong} wrong, {result.resumed} went on at another router; "
        f"first token p50 {percentile(result.first, 50):.2f} s, p99 {percentile(result.first, 99):.2f} s "
        f"(undisturbed {percentile(result.quiet_first, 50):.2f}, {percentile(result.quiet_first, 99):.2f}); "
        f"longest pause p50 {percentile(result.stall, 50):.2f} s, p99 {percentile(result.stall, 99):.2f} s "
        f"(undisturbed {percentile(result.quiet_stall, 50):.2f}, {percentile(result.quiet_stall, 99):.2f})"
    )
