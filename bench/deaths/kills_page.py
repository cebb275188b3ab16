"""Words and pictures of kills and soaks."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from bench.deaths.kills import KillResult, measure, plan, soak_plan
from bench.deaths.streams import MIXED
from bench.harness.memory import before_and_after, slope
from bench.harness.stats import percentile
from bench.harness.style import BLUE, FAINT, GREY, ORANGE, ROLES, Series, canvas, distribution, frame, trails
from bench.harness.tables import Section, Table, number, table
from bench.harness.topic import Topic

WARM_SECONDS: Mapping[str, float] = {"router": 30.0, "engine": 180.0, "detok": 30.0}
"""Warm-up of a process by role, in which its memory may grow: a KV block takes memory once it is first written."""
NAMES = {"router": "Routers", "engine": "Engines", "detok": "Detokenizers"}


def section(result: KillResult) -> Section:
    plan = result.plan
    return Section(
        "Streams while services die",
        f"{plan.streams} streams without pause: {MIXED}, through {plan.routers} routers, {plan.engines} engines "
        f"and {plan.detokenizers} detokenizers, of which a random one gets SIGKILL every {plan.seconds_between:g} s. "
        "Each is compared with its undisturbed run: text, token ids, logprobs, finish reason, usage.",
        [_answer(result)],
        [_pauses(result), _memory(result)],
    )


def soak_section(result: KillResult) -> Section:
    return Section(
        "Soak",
        f"The same load for {result.seconds / 60:.3g} minutes, with a death every {result.plan.seconds_between:g} s. "
        f"*Growth* is the slope of a process's memory over its life after its first {WARM_SECONDS['router']:g} s "
        f"(an engine's {WARM_SECONDS['engine']:g} s, for the KV cache takes memory once it is first written), over all "
        "processes of this service.",
        [_answer(result), *([_growth(result)] if _slopes(result) else [])],
        [_pauses(result), _memory(result)],
    )


def summary(result: KillResult) -> str:
    killed = ", ".join(f"{count} {role}" for role, count in result.killed.items())
    waits = "; ".join(
        f"{name} p50 {percentile(times, 50):.2f} s, p99 {percentile(times, 99):.2f} s "
        f"(undisturbed {percentile(quiet, 50):.2f}, {percentile(quiet, 99):.2f})"
        for name, times, quiet in (
            ("first token", result.first, result.quiet_first),
            ("longest pause", result.stall, result.quiet_stall),
        )
    )
    return (
        f"{len(result.deaths)} kills ({killed}) in {result.seconds:.0f} s: {result.streams} streams, "
        f"{result.failed} failed, {result.wrong} wrong, {result.resumed} went on at another router; {waits}"
    )


def soak_summary(result: KillResult) -> str:
    slopes = ", ".join(f"{name} {growth:+.2f}" for name, growth in _slopes(result).items())
    return (
        f"{result.seconds / 60:.1f} min, {len(result.deaths)} deaths: {result.streams} streams, "
        f"{result.failed} failed, {result.wrong} wrong; MiB per minute after warm-up: {slopes or 'too short to say'}"
    )


def _answer(result: KillResult) -> str:
    killed = ", ".join(f"{count} of {role}" for role, count in result.killed.items())
    return (
        f"{len(result.deaths)} kills ({killed}) in {result.seconds:.0f} s: **{result.streams} streams, "
        f"{result.failed} failed, {result.wrong} wrong**; {result.resumed} went on at another router."
    )


def _growth(result: KillResult) -> str:
    slopes = _slopes(result)
    most = max(slopes, key=slopes.__getitem__)
    return f"After warm-up no service grows by more than **{slopes[most]:.2f} MiB per minute** ({most})."


def _pauses(result: KillResult) -> Table:
    rows = []
    for name, first, stall in (
        ("undisturbed", result.quiet_first, result.quiet_stall),
        ("services die", result.first, result.stall),
    ):
        cells = [number(1000 * percentile(times, p)) for times in (first, stall) for p in (50, 99)]
        rows.append(" | ".join([name, *cells]))
    return table("ms | first token p50 | first token p99 | longest pause p50 | longest pause p99", rows)


def _memory(result: KillResult) -> Table:
    slopes = _slopes(result)
    rows = []
    for service, (before, after) in sorted(before_and_after(result.memory, result.quiet_seconds).items()):
        lives = [trail.mebibytes for trail in result.memory if trail.service == service]
        cells = map(number, (before, after, max(map(max, lives)), slopes.get(service)))
        rows.append(" | ".join([service, str(len(lives)), *cells]))
    return table("memory, MiB | processes | before | at the end | at most | growth per minute", rows)


def _slopes(result: KillResult) -> dict[str, float]:
    """MiB per minute by service, without services that never outlived their warm-up."""
    found = {}
    for service in sorted({trail.service for trail in result.memory}):
        warm = WARM_SECONDS[service.partition("-")[0]]
        lives = [trail.after(warm) for trail in result.memory if trail.service == service]
        growth = slope([trail for trail in lives if trail.seconds])
        if growth is not None:
            found[service] = growth
    return found


def draw(result: KillResult) -> Figure:
    figure, ((first, stall),) = canvas(
        (1, 2), (12, 4.8), "Services die, streams go on", f"{_found(result)} Each stream's longest wait."
    )
    for axes, name, quiet, killed in (
        (first, "First token", result.quiet_first, result.first),
        (stall, "Longest pause", result.quiet_stall, result.stall),
    ):
        distribution(axes, name, "s", [Series("undisturbed", BLUE, quiet), Series("services die", ORANGE, killed)])
    return figure


def draw_soak(result: KillResult) -> Figure:
    roles = [role for role in ROLES if any(trail.role == role for trail in result.memory)]
    figure, grid = canvas(
        (len(roles), 1), (12, 2.2 * len(roles) + 1), "Memory stays constant", f"{_found(result)} A line: a death."
    )
    for (axes,), role in zip(grid, roles, strict=True):
        trails(axes, [trail for trail in result.memory if trail.role == role])
        for death in result.deaths:
            colour = GREY if death.role == role else FAINT
            axes.axvline((death.at + result.quiet_seconds) / 60, color=colour, linewidth=0.9, zorder=0)
        frame(axes, f"{NAMES[role]}, MiB", x="minutes", grid="y")
    return figure


def _found(result: KillResult) -> str:
    return f"{len(result.deaths)} kills, {result.streams:,} streams, {result.failed} failed, {result.wrong} wrong."


TOPIC = Topic(plan, measure, KillResult, section, draw)
SOAK = Topic(soak_plan, measure, KillResult, soak_section, draw_soak)
