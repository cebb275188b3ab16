"""Who shares a step with whom."""

from bench.parts import policies
from bench.sections.words import Section, Table, latencies, number, rate


def of_policies(result: policies.Result) -> Section:
    """In-flight batching under both policies, and static batches."""
    return Section(
        "In-flight batching and static batches",
        f"{result.requests} requests of {result.prompt_tokens} tokens with {result.shortest} to {result.longest} "
        f"tokens of output come at once; where one in eight is long it has {result.longest}, the others "
        f"{policies.SHORT * result.shortest} at most. The engine is driven in process. *Steps* is exact: what a "
        "device whose step takes as long for a full batch as for one sequence would gain. What is left of that in "
        "tokens/s depends on how much a step's time grows with its width: the half-empty steps of a static batch are "
        "cheaper. Where the cache is named it is too small for all that run; where max_tokens is unset a request may "
        "fill the model's context, though it ends long before.",
        [_answer(outcome) for outcome in result.outcomes],
        [_table(outcome) for outcome in result.outcomes],
    )


def _answer(outcome: policies.Outcome) -> str:
    flying, static = outcome.of("max_utilization"), outcome.of(policies.BASE)
    if outcome.mix.pool is not None:
        return _scarce(outcome)
    return (
        f"{outcome.mix.title[0].upper()}{outcome.mix.title[1:]}: in flight **{flying.ratio:.2f}×** the tokens/s of "
        f"static batches, in {flying.steps} steps instead of {static.steps} (**{static.steps / flying.steps:.2f}×** "
        f"fewer) of {number(flying.step_milliseconds)} ms instead of {number(static.step_milliseconds)} ms."
    )


def _scarce(outcome: policies.Outcome) -> str:
    packed, promised = outcome.of("max_utilization"), outcome.of("guaranteed_no_evict")
    return (
        f"{outcome.mix.title[0].upper()}{outcome.mix.title[1:]}: MAX_UTILIZATION in {packed.steps} steps, "
        f"GUARANTEED_NO_EVICT in {promised.steps} (**{promised.steps / packed.steps:.2f}×**); the longest pause "
        f"between two tokens of a request is {_pause(packed)} ms and {_pause(promised)} ms."
    )


def _pause(entry: policies.Entry) -> str:
    return "" if entry.longest_pause is None else number(entry.longest_pause)


def _table(outcome: policies.Outcome) -> Table:
    columns = [
        f"{outcome.mix.title}, {outcome.tokens:,} tokens",
        "steps",
        "ms per step",
        "tokens/s (range)",
        "by static",
        "first token p50 · p99, ms",
        "inter-token p50 · p99, ms",
        "longest pause, ms",
    ]
    rows = [
        [
            policies.POLICIES[entry.policy],
            str(entry.steps),
            number(entry.step_milliseconds),
            rate(entry.figures),
            f"**{entry.ratio:.2f}×**",
            *latencies(entry.figures),
            _pause(entry),
        ]
        for entry in outcome.entries
    ]
    return Table(columns, rows)
