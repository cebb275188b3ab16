"""Streams while services die."""

from collections.abc import Mapping

from bench.deaths.result import Result
from bench.memory import before_and_after, slope
from bench.sections.words import Section, Table, number
from bench.stats import percentile

WARM_SECONDS: Mapping[str, float] = {"router": 30.0, "engine": 180.0, "detok": 30.0}
"""Of a process' life, in which its memory may grow, by role: a block of the KV cache takes memory once it is first
written."""


def of_deaths(result: Result) -> Section:
    """Whether anybody noticed, and how long they waited."""
    plan = result.plan
    return Section(
        "Streams while services die",
        f"{plan.streams} streams without pause: greedy, seeded, n = 2, stop strings, penalties and logprobs mixed, "
        f"through {plan.routers} routers, {plan.engines} engines and {plan.detokenizers} detokenizers, of which one at "
        f"random gets SIGKILL every {plan.seconds_between:g} s. Each stream is compared with what it was undisturbed: "
        "text, token ids, logprobs, finish reason, usage.",
        [_answer(result)],
        [_pauses(result), _memory(result)],
    )


def of_soak(result: Result) -> Section:
    """Whether anybody noticed, and whether memory stays where it is."""
    return Section(
        "Soak",
        f"The same load for {result.seconds / 60:.3g} minutes, with a death every {result.plan.seconds_between:g} s. "
        f"*Growth* is the slope of a process' memory over its life, after its first {WARM_SECONDS['router']:g} s "
        f"(an engine's {WARM_SECONDS['engine']:g} s, for the KV cache takes memory once it is first written), over all "
        "processes that were this service.",
        [_answer(result), *([_growth(result)] if _slopes(result) else [])],
        [_pauses(result), _memory(result)],
    )


def soaked(result: Result) -> str:
    """A soak in a line."""
    slopes = ", ".join(f"{name} {growth:+.2f}" for name, growth in _slopes(result).items())
    return (
        f"{result.seconds / 60:.1f} min, {len(result.deaths)} deaths: {result.streams} streams, "
        f"{result.failed} failed, {result.wrong} wrong; MiB per minute after warm-up: {slopes or 'too short to say'}"
    )


def _answer(result: Result) -> str:
    killed = ", ".join(f"{count} of {role}" for role, count in result.killed.items())
    return (
        f"{len(result.deaths)} kills ({killed}) in {result.seconds:.0f} s: **{result.streams} streams, "
        f"{result.failed} failed, {result.wrong} wrong**; {result.resumed} went on at another router."
    )


def _growth(result: Result) -> str:
    slopes = _slopes(result)
    most = max(slopes, key=slopes.__getitem__)
    return f"After warm-up no service grows by more than **{slopes[most]:.2f} MiB per minute** ({most})."


def _pauses(result: Result) -> Table:
    rows = [
        [name, *(f"{number(1000 * percentile(times, p))}" for times in both for p in (50, 99))]
        for name, both in (
            ("undisturbed", (result.quiet_first, result.quiet_stall)),
            ("services die", (result.first, result.stall)),
        )
    ]
    columns = ["ms", "first token p50", "first token p99", "longest pause p50", "longest pause p99"]
    return Table(columns, rows)


def _memory(result: Result) -> Table:
    slopes = _slopes(result)
    rows = []
    for service, (before, after) in sorted(before_and_after(result.memory, result.quiet_seconds).items()):
        trails = [trail for trail in result.memory if trail.service == service]
        most = max(max(trail.mebibytes) for trail in trails)
        cells = (before, after, most, slopes.get(service))
        rows.append([service, str(len(trails)), *map(number, cells)])
    return Table(["memory, MiB", "processes", "before", "at the end", "at most", "growth per minute"], rows)


def _slopes(result: Result) -> dict[str, float]:
    """By service, MiB per minute; without those that never lived long enough to say."""
    found = {}
    for service in sorted({trail.service for trail in result.memory}):
        warm = WARM_SECONDS[service.partition("-")[0]]
        trails = [trail.after(warm) for trail in result.memory if trail.service == service]
        growth = slope([trail for trail in trails if trail.seconds])
        if growth is not None:
            found[service] = growth
    return found
