"""A topic: one question, from how much is measured over the result to words and a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.figure import Figure

from bench.harness.rounds import Step
from bench.harness.stats import Figures
from bench.harness.tables import Section, number, numbers


class Topic(NamedTuple):
    plan: Callable[[bool, int, Path], Any]
    """(quick, threads, folder for model files) → how much is measured; has `steps`, the number of progress steps."""
    measure: Callable[[Any, Path, Step], msgspec.Struct]
    """(plan, folder for logs, step) → the result."""
    result: type[msgspec.Struct]
    section: Callable[[Any], Section]
    draw: Callable[[Any], Figure]


def engine_settings(threads: int, **others: Any) -> dict[str, Any]:
    """Settings of the tiny model's engine."""
    return {"threads": threads, "kv_cache_tokens": 65536, **others}


def rate_text(figures: Figures) -> str:
    """Tokens per second with their range over the rounds."""
    slowest, fastest = figures.tokens_per_second_range
    return f"{number(figures.tokens_per_second)} ({number(slowest)}–{number(fastest)})"


def latency_cells(figures: Figures) -> str:
    """Two cells: first token and inter-token time, p50 · p99."""
    first = numbers(figures.first_token_p50, figures.first_token_p99)
    return f"{first} | {numbers(figures.inter_token_p50, figures.inter_token_p99)}"
