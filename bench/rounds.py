"""Fair rounds: every system in turn under the same load."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from bench.load import Load, R, System

Step = Callable[[str], None]
"""Hears what was done, once per run."""


def interleave(loads: Sequence[tuple[System[R], Load]], repeats: int, step: Step) -> list[list[R]]:
    """Runs of each system under its load, one list per pair.

    They are taken in turn, every second round backwards, so that the machine's moods hit all alike. A short first round
    warms up and is not counted. Each round has a prefix-cache domain of its own.
    """
    for system, load in loads:
        system.run(_brief(load))
        step(f"{system.name}, warming up")
    runs: list[list[R]] = [[] for _ in loads]
    for repeat in range(repeats):
        order = range(len(loads)) if repeat % 2 == 0 else reversed(range(len(loads)))
        for i in order:
            system, load = loads[i]
            runs[i].append(system.run(replace(load, salt=f"{load.salt}-{repeat}")))
            step(f"{system.name}, round {repeat + 1} of {repeats}")
    return runs


def _brief(load: Load) -> Load:
    """The first `width` requests with two tokens each: the same shapes, little time."""
    asks = [replace(ask, max_tokens=min(ask.max_tokens, 2)) for ask in load.asks[: load.width]]
    return replace(load, asks=asks, salt=f"{load.salt}-warm")
