"""One client reads nothing."""

from bench.memory import before_and_after
from bench.parts import slow_reader
from bench.sections.words import Section, Table, number, span

MOST_SLOWER = 0.05


def of_slow_reader(result: slow_reader.Result) -> Section:
    """Its neighbours' speed, and what is held for it."""
    return Section(
        "A client that reads nothing",
        f"{result.neighbours} streams, with and without one more whose client reads nothing, in turns of "
        f"{result.seconds:g} s; then {result.long_seconds:g} s of that, while memory is watched. It pauses once "
        f"{result.undelivered_tokens} tokens wait for it.",
        [
            f"Beside it the neighbours have **{result.ratio:.1%}** of their speed (rounds: "
            f"{span(_ratios(result), '.0%')}; it may cost {MOST_SLOWER:.0%}).",
            f"When it read on it got {result.read_later:,} of {result.slow_tokens:,} tokens.",
        ],
        [_speeds(result), _memory(result)],
    )


def _ratios(result: slow_reader.Result) -> list[float]:
    return [b / a for a, b in zip(result.without, result.beside, strict=True)]


def _speeds(result: slow_reader.Result) -> Table:
    rows = [
        [str(round_), number(a), number(b), f"{b / a:.3f}"]
        for round_, (a, b) in enumerate(zip(result.without, result.beside, strict=True), 1)
    ]
    return Table(["round", "tokens/s, all read", "tokens/s, one reads nothing", "ratio"], rows)


def _memory(result: slow_reader.Result) -> Table:
    found = before_and_after(result.memory, result.slow_from)
    rows = [
        [service, number(before), number(after), f"{after - before:+.2f}"]
        for service, (before, after) in sorted(found.items())
    ]
    return Table(["memory, MiB", "when it paused", f"{result.long_seconds:g} s later", "difference"], rows)
