"""Savings by the KV cache: prefix reuse, a system prompt retained by priority, evicted blocks in host memory."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import asdict, replace

from bench.harness.load import Load, PlannedRequest, System, Trace
from bench.harness.models import TINY, python_prompts
from bench.harness.style import BLUE, GREY, ORANGE, Series, bars, canvas, dashed, frame, lines
from bench.harness.tables import Section, number, numbers, plural, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave
from bench.systems.engine_alone import engine_alone
from bench.systems.ring import through_ring
from sluice.loadgen.report import percentile
from sluice.wire.params import RangeRetention, RetentionParams

PRIORITY = 100
FLOOD_TOKENS = 256
"""Tokens of each prompt of a flood."""
QUESTION_TOKENS = 32
OUTPUT_TOKENS = 8
BYTES_PER_TOKEN = 6 * 2 * 2 * 64 * 4
"""KV cache of the tiny model: layers, keys and values, heads, head size, float32."""


class Side(NamedTuple):
    load: Load
    counted: slice
    """The requests that are evaluated."""
    tokens: int
    """Prompt tokens of each evaluated request that could be cached."""


class CachePlan(Plan, frozen=True):
    prompts: tuple[int, ...] = (256, 512, 1024, 1920)
    """Lengths of prompts in tokens. `share` of each is in the cache."""
    share: float = 0.9
    repeats: int = 7
    pool_tokens: int = 4096
    system_tokens: int = 512
    floods: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Tokens of other prompts between two uses of the system prompt, in multiples of the pool."""
    visits: int = 3
    seconds: float = 3600.0
    tier_prompt_tokens: int = 504
    working_sets: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0, 4.0)
    """Tokens of all prompts together, in multiples of the pool."""
    revisits: int = 2
    """Repetitions of each prompt, in the same order: the least recently used prompt is always needed next."""
    tier_repeats: int = 2

    @property
    def host_tokens(self) -> int:
        return 5 * self.pool_tokens // 2

    def reuse(self, tokens: int) -> dict[str, Side]:
        prompt, other = python_prompts(TINY, 2, tokens)
        earlier = {"cold": other, "cached": prompt}
        requests = {
            name: [PlannedRequest(ids[: int(tokens * self.share)], 1), PlannedRequest(prompt, 1)]
            for name, ids in earlier.items()
        }
        return {name: Side(Load(own, 1, f"{name}-{tokens}"), slice(1, None), tokens) for name, own in requests.items()}

    def retention(self, flood: float) -> dict[str, Side]:
        """Uses of the system prompt, with a flood before each but the first. The priority expires before the last
        flood."""
        count = round(flood * self.pool_tokens / FLOOD_TOKENS)
        kept = RetentionParams((RangeRetention(0, self.system_tokens, PRIORITY, self.seconds),))
        within, after = slice(count + 1, -1, count + 1), slice(-1, None)
        settings = {"max_tokens_per_step": FLOOD_TOKENS, "kv_host_memory": 0}
        return {
            name: Side(Load(self._visits(count, retention), 1, settings=settings), counted, self.system_tokens)
            for name, retention, counted in (
                ("plain", RetentionParams(), within),
                ("kept", kept, within),
                ("kept, after its time", kept, after),
            )
        }

    def _visits(self, count: int, retention: RetentionParams) -> list[PlannedRequest]:
        (system,) = python_prompts(TINY, 1, self.system_tokens)
        first, *questions = python_prompts(TINY, self.visits + 2, QUESTION_TOKENS)
        # The first prompt is the beginning of the system prompt itself.
        others = iter(python_prompts(TINY, 1 + count * (self.visits + 2), FLOOD_TOKENS)[1:])
        floods = [[PlannedRequest(next(others), 1) for _ in range(count)] for _ in questions]
        # Advance the engine's clock beyond the priority's duration, without waiting for an hour.
        floods[-1][0] = replace(floods[-1][0], passed=self.seconds + 1)
        requests = [PlannedRequest(system + first, 1, retention=retention)]
        for prompts, question in zip(floods, questions, strict=True):
            requests += [*prompts, PlannedRequest(system + question, 1, retention=retention)]
        return requests

    def tier(self, working_set: float) -> dict[str, Side]:
        count = round(working_set * self.pool_tokens / (self.tier_prompt_tokens + OUTPUT_TOKENS))
        prompts = python_prompts(TINY, count, self.tier_prompt_tokens)
        requests = [PlannedRequest(prompt, OUTPUT_TOKENS) for prompt in prompts * (1 + self.revisits)]
        return {
            name: Side(Load(requests, 1, settings=settings), slice(count, None), self.tier_prompt_tokens)
            for name, settings in (("device only", {"kv_host_memory": 0}), ("with host tier", {}))
        }


class Found(msgspec.Struct, frozen=True):
    """One side: medians of the rounds, times to first token in milliseconds."""

    tokens: int
    """Tokens of all evaluated requests of a round that could be cached."""
    cached: int
    """Cached tokens as reported by the server: whole blocks only."""
    first_token_p50: float
    first_token_p99: float | None = None
    """None in older results, except for the host tier."""

    @property
    def share(self) -> float:
        return self.cached / self.tokens

    @property
    def recomputed(self) -> int:
        return self.tokens - self.cached


class CachePoint(msgspec.Struct, frozen=True):
    size: float
    """Tokens of a prompt, or a flood or a working set in multiples of the pool."""
    sides: list[Found]
    ratio: float | None = None
    """Time to first token of the first side divided by that of the second: median of the rounds' ratios. None in some
    older results."""
    same: int = 0
    """Number of outputs that are equal on the first two sides."""
    outputs: int = 0
    """Number of outputs compared."""

    @property
    def sooner(self) -> float:
        first, second, *_ = self.sides
        return first.first_token_p50 / second.first_token_p50 if self.ratio is None else self.ratio

    @property
    def saved(self) -> float:
        """Share of the first side's recomputed tokens that the second side does not recompute; 0 if the first side
        recomputes no tokens."""
        first, second, *_ = self.sides
        return 1 - second.recomputed / first.recomputed if first.recomputed else 0.0


class CacheResult(CachePlan, frozen=True, kw_only=True):
    reused: list[CachePoint]
    retained: list[CachePoint]
    tiered: list[CachePoint]


def measure(plan: CachePlan, logs: Path, step: Step) -> CacheResult:
    with through_ring(TINY, engine_settings(plan.threads), logs) as ring:
        reused = [_point(ring, size, plan.reuse(size), plan.repeats, step) for size in plan.prompts]
    memory = {"kv_cache_tokens": plan.pool_tokens, "kv_host_memory": plan.host_tokens * BYTES_PER_TOKEN}
    with engine_alone(TINY, engine_settings(plan.threads, **memory), logs) as engine:
        retained = [_point(engine, size, plan.retention(size), 1, step) for size in plan.floods]
        tiered = [_point(engine, size, plan.tier(size), plan.tier_repeats, step) for size in plan.working_sets]
    return CacheResult(**asdict(plan), reused=reused, retained=retained, tiered=tiered)


def _point(system: System, size: float, sides: Mapping[str, Side], repeats: int, step: Step) -> CachePoint:
    runs = interleave({f"{size:g}, {name}": (system, side.load) for name, side in sides.items()}, repeats, step)
    rounds = [[run.traces[side.counted] for run in own] for side, own in zip(sides.values(), runs, strict=True)]
    first, second = ([_first_token(traces, 50) for traces in own] for own in rounds[:2])
    outputs = [[trace.tokens for traces in own for trace in traces] for own in rounds[:2]]
    same = [a == b for a, b in zip(*outputs, strict=True)]
    found = [_found(side.tokens, own) for side, own in zip(sides.values(), rounds, strict=True)]
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    return CachePoint(size, found, ratio, sum(same), len(same))


def _found(tokens: int, rounds: Sequence[Sequence[Trace]]) -> Found:
    cached = statistics.median(sum(trace.cached_tokens for trace in traces) for traces in rounds)
    p50, p99 = (statistics.median(_first_token(traces, percent) for traces in rounds) for percent in (50, 99))
    return Found(tokens * len(rounds[0]), round(cached), p50, p99)


def _first_token(traces: Sequence[Trace], percent: float) -> float:
    return percentile([trace.first_token_ms for trace in traces], percent)


def section(result: CacheResult) -> Section:
    longest, worst = result.reused[-1], result.retained[-1]
    plain, kept, after = (f"**{side.share:.0%}**" for side in worst.sides)
    return Section(
        "Savings by the KV cache",
        f"*Reuse*: one stream through the ring; an earlier request has computed {result.share:.0%} of the prompt. Only "
        f"whole blocks are reused. *Retention*: a pool of {result.pool_tokens:,} tokens. A system prompt of "
        f"{result.system_tokens} tokens is used with a new question each time, and other prompts flood the pool "
        f"between two uses; *retained* sets priority {PRIORITY} for {result.seconds / 3600:g} h. There are "
        f"{plural(result.visits, 'use')} within that time, and one after it. *Host tier*: a pool of "
        f"{result.pool_tokens:,} tokens and a host tier of {result.host_tokens:,}. Prompts of "
        f"{result.tier_prompt_tokens} tokens are used one after the other, then {result.revisits} more times in the "
        "same order, which is the worst case for a cache. Figures exclude the first use of each prompt.",
        [
            f"With a prompt of {longest.size:g} tokens, reuse makes the time to first token **{longest.sooner:.1f}×** "
            "shorter.",
            f"After floods of {worst.size:g} pools, {plain} of a system prompt without priority is still cached, "
            f"{kept} of a retained one, and {after} once the priority has expired.",
            *(
                f"With a working set of {point.size:g} pools, the host tier saves **{point.saved:.0%}** of the "
                f"recomputed prompt tokens and makes the time to first token **{point.sooner:.1f}×** shorter; "
                f"{point.same} of {point.outputs} outputs are the same."
                for point in result.tiered
                if point.saved
            ),
        ],
        [
            table(
                "prompt tokens | from the cache | first token, cold, ms | cached, ms | cold / cached",
                map(_reuse_row, result.reused),
            ),
            table(
                "flood, in pools | cached, no priority | cached, retained | cached, expired | "
                "first token, no priority, ms | retained, ms | expired, ms",
                map(_retention_row, result.retained),
            ),
            table(
                "working set, in pools | prompt tokens of repetitions | recomputed | with host tier | saved | "
                "first token p50 · p99, ms | with host tier | same outputs",
                map(_tier_row, result.tiered),
            ),
        ],
    )


def _reuse_row(point: CachePoint) -> str:
    cold, cached = point.sides
    times = f"{cold.first_token_p50:.1f} | {cached.first_token_p50:.1f}"
    return f"{point.size:g} | {cached.cached} | {times} | **{point.sooner:.1f}×**"


def _retention_row(point: CachePoint) -> str:
    plain, kept, after = point.sides
    times = " | ".join(number(side.first_token_p50) for side in point.sides)
    return f"{point.size:g} | {plain.share:.0%} | **{kept.share:.0%}** | {after.share:.0%} | {times}"


def _tier_row(point: CachePoint) -> str:
    device, host = point.sides
    tokens = f"{device.tokens:,} | {device.recomputed:,} | {host.recomputed:,} | **{point.saved:.0%}**"
    times = " | ".join(numbers(side.first_token_p50, side.first_token_p99) for side in point.sides)
    return f"{point.size:g} | {tokens} | {times} | {point.same}/{point.outputs}"


def draw(result: CacheResult) -> Figure:
    pool = f"a pool of {result.pool_tokens:,} tokens, and {result.host_tokens:,} tokens on the host"
    figure, ((reuse, found, again),) = canvas(
        (1, 3), (17, 4.8), "Savings by the KV cache", f"Left: through the ring. Others: {pool}."
    )
    times = _series(
        result.reused, {"cold": ORANGE, f"{result.share:.0%} cached": BLUE}, lambda side: side.first_token_p50
    )
    lines(reuse, [point.size for point in result.reused], times)
    frame(reuse, "Time to first token, ms", x="prompt tokens", grid="y")
    kept = {"no priority": GREY, "retained": BLUE, "expired": ORANGE}
    shares = _series(result.retained, kept, lambda side: 100 * side.share)
    bars(found, [f"{point.size:g}" for point in result.retained], shares)
    frame(found, "Cached", "% of the system prompt", x="flood between two uses, in pools")
    tiers = {"device only": ORANGE, "with host tier": BLUE}
    recomputed = _series(result.tiered, tiers, lambda side: 100 - 100 * side.share)
    lines(again, [point.size for point in result.tiered], recomputed)
    dashed(again, 1.0, "device full")
    dashed(again, 1 + result.host_tokens / result.pool_tokens, "both full")
    frame(again, "Recomputed", "% of the prompt tokens of repetitions", x="working set, in pools", grid="y")
    return figure


def _series(points: Sequence[CachePoint], colours: Mapping[str, str], value: Callable[[Found], float]) -> list[Series]:
    """One series per side; `colours` has the sides' names in order."""
    sides = enumerate(colours.items())
    return [Series(name, colour, [value(point.sides[i]) for point in points]) for i, (name, colour) in sides]


QUICK = CachePlan(
    (128,),
    repeats=1,
    pool_tokens=1024,
    system_tokens=128,
    floods=(2.0,),
    visits=1,
    working_sets=(3.0,),
    revisits=1,
    tier_repeats=1,
)
TOPIC = Topic(CachePlan(), QUICK, measure, CacheResult, section, draw)
