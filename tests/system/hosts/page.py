"""Writes docs/measurements/hosts.md: the outcomes as a table, with date, command and machine."""

from collections.abc import Sequence
from pathlib import Path

from bench.harness.origin import origin
from tests.system.hosts.streams import MAX_PAUSE_SECONDS, Outcome

PAGE = Path(__file__).parents[3] / "docs" / "measurements" / "hosts.md"
HEAD = """\
# Several hosts

The ring has two routers, two engines and two detokenizers. Each service runs in a separate network namespace, which
acts as a machine with its own address; dnsmasq is the DNS server, and keys are mounted as Kubernetes mounts Secrets.
Eight streams (greedy, seeded, n = 2, stop strings, penalties, logprobs, two of 600 tokens) run repeatedly while the
ring is disturbed. Each is compared with the same stream in an undisturbed ring: text, token ids, logprobs, finish
reason and usage must be equal. The namespaces share the cores of one machine, so pauses include the CPU time that
starting services takes.

*Moves* counts streams that needed more than one attempt, or that the client resumed at another router. *Longest pause*
is the longest time that any stream waited for its first or its next chunk.
"""


def write_page(outcomes: Sequence[Outcome], arguments: list[str]) -> None:
    PAGE.write_text(page(outcomes, arguments), encoding="utf-8")


def page(outcomes: Sequence[Outcome], arguments: list[str]) -> str:
    made = origin(arguments, threads=1, module="tests.system.hosts")
    rows = [
        "| scenario | streams | failed | changed | moves | longest pause, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows += [_row(outcome) for outcome in outcomes]
    good = sum(outcome.good for outcome in outcomes)
    verdict = f"{good} of {len(outcomes)} scenarios: 0 failed, 0 changed, no pause above {MAX_PAUSE_SECONDS:g} s."
    source = f"`{made.command}`, {made.date}, {made.machine}; {made.software}."
    return "\n".join([HEAD, *rows, "", verdict, "", source, ""])


def _row(outcome: Outcome) -> str:
    counts = f"{outcome.streams} | {outcome.failed} | {outcome.changed} | {outcome.moves}"
    pause = f"{outcome.pause:.1f}"
    note = "" if not outcome.broken else " (did not end)"
    return f"| {outcome.name}{note} | {counts} | {pause if outcome.pause <= MAX_PAUSE_SECONDS else f'**{pause}**'} |"
