"""Prompts revisited while they do not all fit the device's KV pool: with and without a tier in host memory."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import asdict, replace

from bench.harness.load import Ask, Load, Run, System
from bench.harness.models import TINY, python_prompts
from bench.harness.style import BLUE, ORANGE, Series, canvas, dashed, distribution, frame, lines
from bench.harness.tables import Section, numbers, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave
from bench.systems.engine_alone import engine_alone

SIDES = (("device alone", ORANGE), ("with host tier", BLUE))
BYTES_PER_TOKEN = 6 * 2 * 2 * 64 * 4
"""Of the tiny model's KV cache: layers, keys and values, heads, head size, float32."""


class HostPlan(Plan, frozen=True):
    pool_tokens: int = 4096
    prompt_tokens: int = 504
    output_tokens: int = 8
    working_sets: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0, 4.0)
    """Tokens of all prompts together, in pools."""
    visits: int = 2
    """Of each prompt, after the first, in the same order: the least recently used is needed next."""
    repeats: int = 2

    @property
    def host_tokens(self) -> int:
        return 5 * self.pool_tokens // 2

    def load(self, working_set: float) -> Load:
        prompts = python_prompts(TINY, self.prompts(working_set), self.prompt_tokens)
        return Load([Ask(prompt, self.output_tokens) for prompt in prompts * (1 + self.visits)], 1)

    def prompts(self, working_set: float) -> int:
        return round(working_set * self.pool_tokens / (self.prompt_tokens + self.output_tokens))


class Revisits(msgspec.Struct, frozen=True):
    prompt_tokens: int
    recomputed_tokens: int
    first_token_p50: float
    first_token_p99: float
    times: list[float]
    """First tokens of one round, in milliseconds, sorted."""


class HostPoint(msgspec.Struct, frozen=True):
    working_set: float
    prompts: int
    device: Revisits
    host: Revisits
    same: int
    outputs: int
    saved: float
    """Share of the recomputed tokens that the host tier saves; 0 if there were none."""


class HostResult(HostPlan, frozen=True, kw_only=True):
    points: list[HostPoint]


def measure(plan: HostPlan, logs: Path, step: Step) -> HostResult:
    settings = {"kv_cache_tokens": plan.pool_tokens, "kv_host_memory": plan.host_tokens * BYTES_PER_TOKEN}
    with engine_alone(TINY, engine_settings(plan.threads, **settings), logs) as engine:
        points = [_point(engine, plan, working_set, step) for working_set in plan.working_sets]
    return HostResult(**asdict(plan), points=points)


def _point(engine: System, plan: HostPlan, working_set: float, step: Step) -> HostPoint:
    load = plan.load(working_set)
    sides = {
        f"{working_set:g} pools, {name}": (engine, replace(load, settings=settings))
        for (name, _), settings in zip(SIDES, ({"kv_host_memory": 0}, {}), strict=True)
    }
    without, tiered = interleave(sides, plan.repeats, step)
    prompts = plan.prompts(working_set)
    device, host = (_revisits(runs, prompts, plan) for runs in (without, tiered))
    pairs = [pair for a, b in zip(without, tiered, strict=True) for pair in zip(a.traces, b.traces, strict=True)]
    saved = 1 - host.recomputed_tokens / device.recomputed_tokens if device.recomputed_tokens else 0.0
    same = sum(a.tokens == b.tokens for a, b in pairs)
    return HostPoint(working_set, prompts, device, host, same, len(pairs), saved)


def _revisits(runs: Sequence[Run], prompts: int, plan: HostPlan) -> Revisits:
    visits = [list(run.traces[prompts:]) for run in runs]
    times = [sorted(trace.first_token_ms for trace in of_run) for of_run in visits]
    return Revisits(
        plan.prompt_tokens * len(visits[0]),
        round(statistics.median(sum(plan.prompt_tokens - t.cached_tokens for t in of_run) for of_run in visits)),
        statistics.median(statistics.median(of_run) for of_run in times),
        statistics.median(statistics.quantiles(of_run, n=100, method="inclusive")[98] for of_run in times),
        times[0],
    )


def section(result: HostResult) -> Section:
    rows = (
        f"{p.working_set:g} | {p.device.prompt_tokens:,} | {p.device.recomputed_tokens:,} | "
        f"{p.host.recomputed_tokens:,} | **{p.saved:.0%}** | {_times(p.device)} | {_times(p.host)} | "
        f"{p.same}/{p.outputs}"
        for p in result.points
    )
    tokens = "prompt tokens of revisits | computed again | with host tier | saved"
    times = "first token p50 · p99, ms | with host tier | same outputs"
    return Section(
        "Evicted blocks in host memory",
        f"A pool of {result.pool_tokens:,} tokens and a host tier of {result.host_tokens:,}. Prompts of "
        f"{result.prompt_tokens} tokens are visited one after the other, then {result.visits} more times in the same "
        "order: the worst case of a cache. Figures are of all visits but the first of each prompt.",
        [
            f"A working set of {p.working_set:g} pools: **{p.saved:.0%}** fewer prompt tokens computed again; the "
            f"first token **{p.device.first_token_p50 / p.host.first_token_p50:.1f}×** sooner; {p.same} of {p.outputs} "
            "outputs the same."
            for p in result.points
            if p.saved
        ],
        [table(f"working set, in pools | {tokens} | {times}", rows)],
    )


def _times(revisits: Revisits) -> str:
    return numbers(revisits.first_token_p50, revisits.first_token_p99)


def draw(result: HostResult) -> Figure:
    memory = f"a pool of {result.pool_tokens:,} tokens, {result.host_tokens:,} more on the host"
    about = f"Prompts of {result.prompt_tokens} tokens, revisited in order; {memory}."
    figure, ((again, first),) = canvas((1, 2), (12, 4.8), "Evicted blocks wait in host memory", about)
    sides = [(name, colour, [(p.device, p.host)[i] for p in result.points]) for i, (name, colour) in enumerate(SIDES)]
    shares = [
        Series(name, colour, [100 * own.recomputed_tokens / own.prompt_tokens for own in found])
        for name, colour, found in sides
    ]
    lines(again, [point.working_set for point in result.points], shares)
    dashed(again, 1.0, "device full")
    dashed(again, 1 + result.host_tokens / result.pool_tokens, "both full")
    frame(again, "Computed again", "% of the prompt tokens of revisits", x="working set, in pools", grid="y")
    best = max(range(len(result.points)), key=lambda i: (result.points[i].saved, result.points[i].working_set))
    heading = f"First token at {result.points[best].working_set:g} pools"
    times = [Series(name, colour, found[best].times) for name, colour, found in sides]
    distribution(first, heading, "ms", times, "linear")
    return figure


QUICK = HostPlan(512, 120, working_sets=(3.0,), visits=1, repeats=1)
TOPIC = Topic(HostPlan(), QUICK, measure, HostResult, section, draw)
