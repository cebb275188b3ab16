"""Fair rounds: every system in turn under the same load."""

import argparse
import inspect
import subprocess
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace
from tokenizers import Tokenizer

from bench.harness.load import Load, R, System

SOURCES = (argparse, inspect, subprocess, typing)

Step = Callable[[str], None]
"""Progress: called once per run with what was done."""


def python_prompts(model: Path, count: int, tokens: int) -> list[list[int]]:
    """`count` prompts of `tokens` token ids each, stretches of the standard library that differ from their first block
    on. The tiny model was trained on Python, so its continuations look like real work."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = [i for module in SOURCES for i in tokenizer.encode(inspect.getsource(module)).ids]
    stride = max(1, (len(ids) - tokens) // count)
    return [ids[at : at + tokens] for at in range(0, count * stride, stride)]


def interleave(loads: Sequence[tuple[System[R], Load]], repeats: int, step: Step) -> list[list[R]]:
    """Runs of each system under its load, one list per pair.

    Every second round goes backwards, so that drift of the machine affects all systems alike. A short uncounted round
    warms up. Each round has a prefix-cache domain of its own.
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
