"""A second tier in host memory."""

from bench.parts import host
from bench.sections.words import Section, Table, number


def of_host(result: host.Result) -> Section:
    """By the working set."""
    room = (result.pool_tokens + result.host_tokens) / result.pool_tokens
    return Section(
        "Evicted blocks in host memory",
        f"A pool of {result.pool_tokens:,} tokens and a host tier of {result.host_tokens:,}. Prompts of "
        f"{result.prompt_tokens} tokens are visited one after the other, and then {result.visits} more times in the "
        "same order, so that what was used longest ago is wanted next: the worst case of a cache. Prompt tokens "
        "computed again, and first tokens, of all visits but the first of each. "
        f"Both tiers together hold {room:g} pools.",
        [_answer(point) for point in result.points if point.saved],
        [_table(result)],
    )


def _answer(point: host.Point) -> str:
    return (
        f"A working set of {point.working_set:g} pools: **{point.saved:.0%}** fewer prompt tokens computed again; the "
        f"first token after {number(point.host.first_token_p50)} instead of {number(point.device.first_token_p50)} ms "
        f"(**{point.device.first_token_p50 / point.host.first_token_p50:.1f}×** sooner); {point.same} of "
        f"{point.outputs} outputs the same."
    )


def _table(result: host.Result) -> Table:
    columns = [
        "working set, in pools",
        "prompt tokens of revisits",
        "computed again",
        "with host tier",
        "saved",
        "first token p50 · p99, ms",
        "with host tier",
        "same outputs",
    ]
    rows = [
        [
            f"{point.working_set:g}",
            f"{point.device.prompt_tokens:,}",
            f"{point.device.recomputed_tokens:,}",
            f"{point.host.recomputed_tokens:,}",
            f"**{point.saved:.0%}**",
            _times(point.device),
            _times(point.host),
            f"{point.same}/{point.outputs}",
        ]
        for point in result.points
    ]
    return Table(columns, rows)


def _times(revisits: host.Revisits) -> str:
    return f"{number(revisits.first_token_p50)} · {number(revisits.first_token_p99)}"
