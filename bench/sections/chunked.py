"""Who waits for a long prompt."""

from bench.parts import chunked
from bench.sections.words import Section, Table, number


def of_chunked(result: chunked.Result) -> Section:
    """In one piece, and in chunks by both policies."""
    whole, equal = result.of(chunked.BASE), result.of("chunked, equal progress")
    ordered = result.of("chunked, first come first served")
    return Section(
        "A long prompt among others, chunked and in one piece",
        f"A prompt of {result.context_tokens:,} tokens comes while {result.streams} streams generate, and newcomers of "
        f"{result.newcomer_tokens} tokens come evenly within the time that it takes in one piece. Chunked, a step "
        f"computes {result.tokens_per_step} tokens at most. First come first served gives the whole step to the long "
        "prompt until it is done; equal progress lets newcomers by. A stream's p99 is that of the time between two "
        "tokens while the long prompt is computed.",
        [
            f"A newcomer's first token, p99: **{whole.newcomer_p99 / equal.newcomer_p99:.1f}×** sooner in equal "
            f"progress than in one piece ({number(equal.newcomer_p99)} instead of {number(whole.newcomer_p99)} ms).",
            f"Between two tokens of a running stream, p99: {number(ordered.stream_p99)} ms chunked instead of "
            f"{number(whole.stream_p99)} ms, **{whole.stream_p99 / ordered.stream_p99:.1f}×** less.",
            f"The long prompt itself has its first token after {number(whole.long)} ms in one piece, "
            f"{number(ordered.long)} ms chunked first come first served, {number(equal.long)} ms in equal progress.",
        ],
        [_table(result)],
    )


def _table(result: chunked.Result) -> Table:
    columns = [
        "the long prompt",
        "newcomers: first token p50 · p99, ms",
        "streams: inter-token p50 · p99, ms",
        "its own first token, ms",
        "newcomers seen",
    ]
    rows = [
        [
            entry.mode,
            f"{number(entry.newcomer_p50)} · {number(entry.newcomer_p99)}",
            f"{number(entry.stream_p50)} · {number(entry.stream_p99)}",
            number(entry.long),
            str(entry.newcomers),
        ]
        for entry in result.entries
    ]
    return Table(columns, rows)
