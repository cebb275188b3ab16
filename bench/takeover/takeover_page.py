"""The topic `takeover`: its part of the page, and its plot."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from bench.harness.pool_files import NOT_USED, ON, SIDES
from bench.harness.style import GREY, TEAL, Series, bars, canvas, frame
from bench.harness.tables import Section, Table, number, numbers, table
from bench.harness.topic import Topic
from bench.takeover.takeovers import CASES, KILLED, Takeover, TakeoverPlan, TakeoverResult, measure, quick
from sluice.loadgen.report import percentile

GOAL_SECONDS = 1.0
"""Highest acceptable p99 of the pause after the death of an engine with a twin."""
COLOURS = dict(zip(SIDES, (GREY, TEAL), strict=True))


def section(result: TakeoverResult) -> Section:
    plan = result.plan
    return Section(
        "Takeover of long contexts",
        f"{plan.model_name}, one stream through a router and a detokenizer, with one engine or two and default "
        f"settings. After {plan.begun} of {plan.max_tokens} output tokens the stream's engine gets SIGKILL (killed), "
        f"SIGSTOP (frozen) or SIGTERM (drained), {plan.repeats} times each; *killed twice*: again, after "
        f"{plan.begun} more tokens. *Pause*: the longest time between two deltas from then on. *First token*: of the "
        "same streams, computed without any cached block. *Computed again*: context tokens that the engines computed "
        "from then on, at most. Each stream is compared with its undisturbed run: text, tokens, log-probabilities. "
        "Rings with and without [pool files](../kv_cache.md) take turns.",
        [_sameness(result.runs), *(_killed(result, kv) for kv in plan.kv), *_copies(result)],
        [_table(result, precision, prompt) for precision in plan.precisions for prompt in plan.prompts],
    )


def _sameness(runs: Sequence[Takeover]) -> str:
    wrong, bits = sum(bool(run.difference) for run in runs), sum(not run.same_bits for run in runs)
    return f"**{wrong} of {len(runs)} streams** failed or differed, {bits} in bits of log-probabilities."


def _killed(result: TakeoverResult, kv: str) -> str:
    longest = max(result.plan.prompts)
    runs = result.of(case=KILLED, kv=kv, prompt=longest)
    pauses, firsts = ([getattr(run, name) for run in runs] for name in ("pause", "first_token"))
    goal = f"; goal: at most {GOAL_SECONDS:g}" if kv == ON else ""
    return (
        f"{SIDES[kv].capitalize()}: a stream with a context of {longest:,} tokens pauses for {_middle(pauses)} s (p50) "
        f"and **{number(percentile(pauses, 99))} s** (p99{goal}) when its engine is killed and another is alive; its "
        f"first token took {_middle(firsts)} s (p50)."
    )


def _copies(result: TakeoverResult) -> list[str]:
    if not result.in_files:
        return [NOT_USED]
    runs = result.of(kv=ON)
    fetched, adopted = sum(run.fetched for run in runs), sum(run.adopted for run in runs)
    return [f"With pool files, engines fetched {fetched:,} blocks and adopted {adopted:,}."] if runs else []


def _middle(seconds: Sequence[float]) -> str:
    return number(percentile(seconds, 50))


def _table(result: TakeoverResult, precision: str, prompt: int) -> Table:
    sides = [SIDES[kv] for kv in result.plan.kv]
    head = [
        f"{precision}, {prompt:,} tokens",
        *(f"pause p50 · p99, s, {side}" for side in sides),
        *(f"first token p50 · p99, s, {side}" for side in sides),
        *(f"computed again, {side}" for side in sides),
        "streams that differ",
    ]
    rows = []
    for case in CASES:
        runs = [result.of(precision=precision, prompt=prompt, case=case, kv=kv) for kv in result.plan.kv]
        rows.append(
            [
                case,
                *(_percentiles([run.pause for run in side]) for side in runs),
                *(_percentiles([run.first_token for run in side]) for side in runs),
                *(f"{max(run.recomputed for run in side):,}" for side in runs),
                str(sum(bool(run.difference) for side in runs for run in side)),
            ]
        )
    return table(" | ".join(head), (" | ".join(row) for row in rows))


def _percentiles(seconds: Sequence[float]) -> str:
    return numbers(percentile(seconds, 50), percentile(seconds, 99))


def draw(result: TakeoverResult) -> Figure:
    plan = result.plan
    about = "The longest pause of a stream, in seconds, p50, on a logarithmic scale."
    shape = (len(plan.precisions), len(plan.prompts))
    figure, grid = canvas(shape, (6.5 * shape[1], 3.6 * shape[0] + 1), "Takeover of long contexts", about)
    for precision, row in zip(plan.precisions, grid, strict=True):
        for prompt, axes in zip(plan.prompts, row, strict=True):
            bars(axes, [case.replace(", ", "\n") for case in CASES], _series(result, precision, prompt))
            axes.set_yscale("log")
            axes.set_yticks([])
            axes.minorticks_off()
            axes.margins(y=0.25)
            frame(axes, f"{precision}, {prompt:,} tokens")
    return figure


def _series(result: TakeoverResult, precision: str, prompt: int) -> list[Series]:
    def pause(case: str, kv: str) -> float:
        runs = result.of(precision=precision, prompt=prompt, case=case, kv=kv)
        # The logarithmic scale needs positive values.
        return max(1e-3, percentile([run.pause for run in runs], 50))

    return [Series(SIDES[kv], COLOURS[kv], [pause(case, kv) for case in CASES]) for kv in result.plan.kv]


PLAN = TakeoverPlan()
TOPIC = Topic(PLAN, quick(PLAN), measure, TakeoverResult, section, draw)
