"""A system prompt kept by priority."""

from bench.parts import retention
from bench.sections.words import Section, Table, number


def of_retention(result: retention.Result) -> Section:
    """By the size of the floods."""
    worst = result.points[-1]
    hours = f"{result.seconds / 3600:g} hour{'' if result.seconds == 3600 else 's'}"
    return Section(
        "A system prompt kept by priority",
        f"A pool of {result.pool_tokens:,} tokens. A system prompt of {result.system_tokens} tokens comes with a new "
        f"question each time, and other prompts flood the pool between two visits; *kept* gives it priority "
        f"{retention.PRIORITY} for {hours}. Shares of the system prompt that were found in the cache, and the visit's "
        f"first token: {result.visits} visits within the time, and one after it has passed.",
        [
            f"Floods of {worst.flood:g} pools leave **{worst.plain.before:.0%}** of a plain system prompt and "
            f"**{worst.kept.before:.0%}** of one that is kept; its first token then comes after "
            f"{number(worst.kept.first_token_before)} instead of {number(worst.plain.first_token_before)} ms.",
            f"When its time has passed, **{worst.kept.after:.0%}** are left of it.",
        ],
        [_table(result)],
    )


def _table(result: retention.Result) -> Table:
    columns = [
        "flood, in pools",
        "plain: found",
        "kept: found",
        "kept: found after its time",
        "plain: first token, ms",
        "kept: first token, ms",
        "after its time, ms",
    ]
    rows = [
        [
            f"{point.flood:g}",
            f"{point.plain.before:.0%}",
            f"**{point.kept.before:.0%}**",
            f"{point.kept.after:.0%}",
            number(point.plain.first_token_before),
            number(point.kept.first_token_before),
            number(point.kept.first_token_after),
        ]
        for point in result.points
    ]
    return Table(columns, rows)
