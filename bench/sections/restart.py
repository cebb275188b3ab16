"""Streams while services are restarted, and while an engine stands still."""

from bench.parts.restart import GOES_ON, RESTARTS, STOPPED, Phase, Restart, Result
from bench.sections.words import Section, Table, number
from bench.stats import percentile

MOST_SECONDS = 5.0
"""That a drain is to take."""


def of_restart(result: Result) -> Section:
    """Whether anybody noticed, and how long it takes."""
    plan = result.plan
    return Section(
        "Streams while services are restarted, and while an engine stands still",
        f"{plan.streams} streams without pause: greedy, seeded, n = 2, stop strings, penalties and logprobs mixed, "
        f"through {plan.routers} routers, {plan.engines} engines and {plan.detokenizers} detokenizers; a service that "
        f"is not heard for {result.peer_seconds:g} s is taken for dead. Every service is restarted, one after the "
        f"other, with a drain timeout of {plan.drain_timeout:g} s; then {result.frozen.service} gets SIGSTOP, and "
        f"SIGCONT {plan.stopped_seconds:g} s later. Each stream is compared with what it was undisturbed, and counted "
        "where it ended. *Serves again*: from the end of the process until the next one serves and all routers know.",
        [_restarts(result), _freeze(result)],
        [_pauses(result), _drains(result)],
    )


def _restarts(result: Result) -> str:
    longest = max(result.restarts, key=_drain)
    return (
        f"{len(result.restarts)} services restarted in {_phase(result, RESTARTS).seconds:.0f} s: "
        f"{_streams(_phase(result, RESTARTS))}. The longest drain took **{longest.drain:.2f} s** ({longest.service}; "
        f"it is to be less than {MOST_SECONDS:g} s)."
    )


def _freeze(result: Result) -> str:
    frozen, left = result.frozen, result.left
    what = f"{left.requests} requests, {left.blocks} blocks and {left.streams} streams are left in the ring"
    unheard = f"; {', '.join(left.unheard)} not heard" if left.unheard else ""
    return (
        f"{frozen.service} stands still for {frozen.seconds:g} s: {_streams(_phase(result, STOPPED))}. It held "
        f"{frozen.held} requests; when it went on it drew late tokens of {frozen.late} of them, and got {frozen.new} "
        f"new ones: {_streams(_phase(result, GOES_ON))}. In the end {what}{unheard}."
    )


def _streams(phase: Phase) -> str:
    return f"**{phase.streams} streams, {phase.failed} failed, {phase.wrong} wrong, {phase.repeated} repeated**"


def _phase(result: Result, name: str) -> Phase:
    return next(phase for phase in result.phases if phase.name == name)


def _drain(restart: Restart) -> float:
    return restart.drain


def _pauses(result: Result) -> Table:
    rows = [
        [
            phase.name,
            *map(str, (phase.streams, phase.failed, phase.wrong, phase.repeated, phase.resumed)),
            *(number(1000 * percentile(times, p)) for times in (phase.first, phase.stall) for p in (50, 99)),
        ]
        for phase in result.phases
    ]
    counts = ["streams", "failed", "wrong", "repeated", "at another router"]
    times = ["first token p50, ms", "first token p99", "longest pause p50", "longest pause p99"]
    return Table(["", *counts, *times], rows)


def _drains(result: Result) -> Table:
    rows = [
        [restart.service, number(restart.drain), number(restart.back), restart.ending] for restart in result.restarts
    ]
    return Table(["restarted", "drain, s", "serves again after, s", "the process"], rows)
