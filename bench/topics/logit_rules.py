"""The cost of rules that depend on earlier tokens: penalties, bad words, n-grams."""

import random
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from matplotlib.figure import Figure
from msgspec.structs import asdict

from bench.harness.style import BLUE, GREY, INK, ORANGE, TEAL, Series, canvas, frame, lines
from bench.harness.tables import Section, Table, number, table
from bench.harness.topic import Plan, Step, Topic
from engine_worker.sampling.logit_rules import LogitRules, build_logit_rules
from engine_worker.sampling.sampler import SamplingPlan, sample
from engine_worker.step import Draw
from sluice.wire.params import SamplingParams

LIMIT = 30.0
"""Highest acceptable cost of the rules of a sequence in a step, in microseconds."""
COMMON_TOKENS = 3000
"""Prompts and outputs consist of this many different tokens, since texts repeat their words."""
WORDS = tuple((i, i + 1, i + 2) for i in range(100))
KINDS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "n-grams of 3": {"no_repeat_ngram_size": 3},
    "100 bad words": {"bad_words": WORDS},
}
ALL = "all of these"


class LogitRulesPlan(Plan, frozen=True):
    sequences: tuple[int, ...] = (1, 8, 32)
    prompts: tuple[int, ...] = (128, 4096, 30_000)
    vocabulary: int = 65_536
    samples: int = 100
    repeats: int = 5


class LogitRulesPoint(msgspec.Struct, frozen=True):
    kind: str
    sequences: int
    prompt: int
    step: float
    """Microseconds of sampling, from the draws to the tokens: median of the rounds' medians."""
    added: float
    """Additional microseconds per sequence compared with the same rounds without rules."""


class LogitRulesResult(LogitRulesPlan, frozen=True, kw_only=True):
    points: list[LogitRulesPoint]

    def of(self, kind: str, prompt: int) -> list[LogitRulesPoint]:
        """The points by number of sequences."""
        return [point for point in self.points if (point.kind, point.prompt) == (kind, prompt)]


class Sequences:
    """Greedy sequences with one kind of rules, after some output tokens."""

    def __init__(self, kind: str, count: int, prompt: int) -> None:
        options = {key: value for each in KINDS.values() for key, value in each.items()} if kind == ALL else KINDS[kind]
        self._params = SamplingParams(temperature=0.0, **options)
        self._random = random.Random(7)
        self._outputs = [self._tokens(200) for _ in range(count)]
        self._rules: list[LogitRules | None] = [
            rules for _ in range(count) for rules in build_logit_rules(self._params, self._tokens(prompt))
        ]

    def timed_step(self, logits: torch.Tensor) -> float:
        """CPU seconds of one draw per sequence. CPU time excludes other processes on the machine."""
        both = zip(self._outputs, self._rules, strict=True)
        draws = [Draw(self._params, 0, len(output), output, rules) for output, rules in both]
        logits = logits.clone()
        began = time.thread_time()
        plan = SamplingPlan.of(draws, range(len(draws)), len(draws), logits.shape[1], {})
        sample(logits, plan, plan.run_rules(logits, None))
        seconds = time.thread_time() - began
        for output in self._outputs:
            output += self._tokens(1)
        return seconds

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(COMMON_TOKENS), k=count)


@torch.inference_mode()
def measure(plan: LogitRulesPlan, _: Path, step: Step) -> LogitRulesResult:
    points = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for count, prompt in product(plan.sequences, plan.prompts):
        logits = torch.randn(count, plan.vocabulary)
        contenders = {kind: Sequences(kind, count, prompt) for kind in (*KINDS, ALL)}
        rounds: dict[str, list[float]] = {kind: [] for kind in contenders}
        for round_ in range(plan.repeats):
            for kind, sequences in contenders.items():
                times = [sequences.timed_step(logits) for _ in range(plan.samples)]
                rounds[kind].append(1e6 * float(np.median(times)))
            step(f"{count:,} sequences, prompts of {prompt:,}, round {round_ + 1} of {plan.repeats}")
        for kind, own in rounds.items():
            added = float(np.median(np.subtract(own, rounds["none"]))) / count
            points.append(LogitRulesPoint(kind, count, prompt, float(np.median(own)), added))
    torch.set_num_threads(threads)
    return LogitRulesResult(**asdict(plan), points=points)


def section(result: LogitRulesResult) -> Section:
    most = result.sequences[-1]
    dearest = max((point for point in result.points if point.sequences == most), key=lambda point: point.added)
    single = [point.added for point in result.points if point.kind != ALL and point.sequences == most]
    return Section(
        "Cost of penalties, bad words and n-gram bans",
        f"Greedy sampling from random logits over a vocabulary of {result.vocabulary:,} on one thread, without a "
        "model: CPU time of sampling with and without these rules, in turns.",
        [
            f"With {most} sequences, one kind of rule costs at most **{number(max(single))} µs** per sequence and step "
            f"(limit: {number(LIMIT)}), and all kinds together {number(dearest.added)} µs, after prompts of up to "
            f"{result.prompts[-1]:,} tokens."
        ],
        [_table(result, prompt) for prompt in result.prompts],
    )


def _table(result: LogitRulesResult, prompt: int) -> Table:
    rows = [
        f"{kind} | " + " | ".join(number(point.added) for point in result.of(kind, prompt))
        for kind in (*KINDS, ALL)
        if kind != "none"
    ]
    plain = " | ".join(number(point.step) for point in result.of("none", prompt))
    names = " | ".join(f"{count:,} sequences" if count > 1 else "1 sequence" for count in result.sequences)
    return table(
        f"added µs per sequence, prompts of {prompt:,} | {names}", [*rows, f"*a step without rules* | {plain}"]
    )


def draw(result: LogitRulesResult) -> Figure:
    about = (
        f"CPU µs that rules add per sequence and step, by the number of sequences. Vocabulary {result.vocabulary:,}."
    )
    figure, (row,) = canvas((1, len(result.prompts)), (12, 4.6), "Cost of penalties, bad words and n-gram bans", about)
    colours = dict(zip((*KINDS, ALL), (GREY, BLUE, TEAL, ORANGE, INK), strict=True))
    for axes, prompt in zip(row, result.prompts, strict=True):
        shown = [
            Series(kind, colours[kind], [point.added for point in result.of(kind, prompt)])
            for kind in (*KINDS, ALL)
            if kind != "none"
        ]
        axes.set_xscale("log", base=2)
        lines(axes, result.sequences, shown)
        frame(axes, f"Prompts of {prompt:,}", "µs per sequence", x="sequences", grid="y")
        axes.axhline(LIMIT, color=GREY, linestyle=":", linewidth=1)
    return figure


QUICK = LogitRulesPlan((1, 2), (16,), vocabulary=4096, samples=3, repeats=1)
TOPIC = Topic(LogitRulesPlan(), QUICK, measure, LogitRulesResult, section, draw)
