"""What pool files cost: CPU time of prompts and of generation with and without them, and the cost of copies."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace

from bench.harness.load import Load, PlannedRequest, Run
from bench.harness.models import TINY, python_prompts
from bench.harness.pool_files import MEMORY, NOT_USED, OFF, ON
from bench.harness.real_model import real_model
from bench.harness.stats import ratio
from bench.harness.style import BLUE, ORANGE, Series, bars, canvas, frame
from bench.harness.tables import Section, number, span, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave
from bench.systems.engine_alone import engine_alone
from bench.takeover import copies

LIMIT = 0.005
"""Highest acceptable share of added CPU time."""
PREFILL, DECODE = "prompts", "generation"
REAL = "SmolLM2, OpenVINO"
BACKENDS: Mapping[str, Mapping[str, Any]] = {"tiny, torch": {"backend": "torch"}, REAL: {"backend": "openvino"}}


class CostsPlan(Plan, frozen=True, kw_only=True):
    systems: tuple[str, ...] = tuple(BACKENDS)
    prompt: int = 1024
    prompts: int = 4
    """One after the other, with one output token."""
    streams: int = 8
    """Together, after short prompts."""
    stream_prompt: int = 64
    output: int = 256
    kv_cache_tokens: int = 16_384
    copied: int = 4096
    """Tokens whose blocks are copied and adopted."""
    repeats: int = 9

    def loads(self, model: Path) -> dict[str, Load]:
        long = [PlannedRequest(prompt, 1) for prompt in python_prompts(model, self.prompts, self.prompt)]
        short = python_prompts(model, self.streams, self.stream_prompt)
        generation = Load([PlannedRequest(prompt, self.output) for prompt in short], self.streams)
        return {PREFILL: Load(long, 1), DECODE: generation}


class CostPoint(msgspec.Struct, frozen=True):
    system: str
    work: str
    cpu: float
    """Microseconds of CPU time per token without pool files: tokens of prompts, or output tokens."""
    added: list[float]
    """CPU time with pool files divided by that without, minus one, by round."""
    speed: float
    """With pool files divided by that without."""

    @property
    def share(self) -> float:
        return statistics.median(self.added)


class CostsResult(msgspec.Struct, frozen=True):
    plan: CostsPlan
    points: list[CostPoint]
    copies: copies.Copies
    in_files: bool = True
    """Whether the engines that should have pool files had them."""


def measure(plan: CostsPlan, logs: Path, step: Step) -> CostsResult:
    points, in_files = [], True
    for name in plan.systems:
        model = TINY if name.startswith("tiny") else real_model()
        settings = engine_settings(plan.threads, kv_cache_tokens=plan.kv_cache_tokens, **BACKENDS[name])
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=MEMORY))
            systems = {
                kv: stack.enter_context(engine_alone(model, {**settings, **own}, logs))
                for kv, own in ((OFF, {}), (ON, {"kv_folder": folder}))
            }
            for work, load in plan.loads(model).items():
                sides = {f"{name}, {work}, pool files {kv}": (system, load) for kv, system in systems.items()}
                without, with_files = interleave(sides, plan.repeats, step)
                points.append(_point(name, work, load, without, with_files))
            in_files &= any(path.is_file() for path in Path(folder).rglob("*"))
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=MEMORY) as folder:
        copied = copies.measure(Path(folder), plan.copied, plan.repeats)
    step("copies")
    return CostsResult(plan, points, copied, in_files)


def _point(name: str, work: str, load: Load, without: Sequence[Run], with_files: Sequence[Run]) -> CostPoint:
    tokens = sum(len(request.prompt) for request in load.requests) if work == PREFILL else load.tokens
    cpu = 1e6 * statistics.median(run.cpu["engine"] for run in without) / tokens
    added = [b.cpu["engine"] / a.cpu["engine"] - 1 for a, b in zip(without, with_files, strict=True)]
    return CostPoint(name, work, cpu, added, ratio(with_files, without))


def section(result: CostsResult) -> Section:
    plan = result.plan
    rows = (
        f"{point.system}, {point.work} | {number(point.cpu)} | {point.share:+.2%} | {span(point.added, '+.1%')} | "
        f"{point.speed:.3f}×"
        for point in result.points
    )
    copied = result.copies
    costs = (
        f"copying into memory never used, CPU s | {number(copied.fresh)} | {copies.FRESH_LIMIT:g}",
        f"copying into memory used before, CPU s | {number(copied.again)} | {copies.AGAIN_LIMIT:g}",
        f"a look-up if there is nothing to copy, CPU µs | {number(copied.nothing)} | {copies.NOTHING_LIMIT:g}",
        f"adopting a file, CPU s per GB | {number(copied.adoption)} | {copies.ADOPTION_LIMIT:g}",
    )
    worst = max(result.points, key=lambda point: point.share)
    filing = "".join(
        f" This is **{_filing(point, copied):.2%}** of the CPU time of {point.work} ({point.system}; limit: "
        f"{LIMIT:.1%})."
        for point in result.points
        if point.system == REAL
    )
    return Section(
        "Cost of pool files",
        f"The engine in process, with and without pool files in turns; nothing is cached and nothing copied. *Prompts* "
        f"of {plan.prompt:,} tokens, one at a time; *generation*: {plan.streams} streams of {plan.output} tokens each. "
        "The limits of copies are for 4,096 tokens.",
        [
            f"To file a block (its sum, its entry, and clearing the entry) takes {number(copied.filed)} µs of CPU time."
            f"{filing}",
            f"In turns, the runs with pool files take at most **{worst.share:+.2%}** more CPU time ({worst.system}, "
            f"{worst.work}); the rounds differ by much more.",
            *([] if result.in_files else [NOT_USED]),
        ],
        [
            table("| CPU µs per token without | added with pool files | rounds | speed", rows),
            table(f"blocks of {copied.tokens:,} tokens of SmolLM2, float32 | measured | limit", costs),
        ],
    )


def _filing(point: CostPoint, copied: copies.Copies) -> float:
    """Share of the CPU time: each block is filed once."""
    return copied.filed / (copies.SMOLLM2.tokens_per_block * point.cpu)


def draw(result: CostsResult) -> Figure:
    about = "CPU time of the engine that is added by pool files, in percent: median of the rounds."
    figure, ((axes,),) = canvas((1, 1), (8, 4.8), "Cost of pool files", about)
    names = list(dict.fromkeys(point.system for point in result.points))
    series = [
        Series(work, colour, [100 * point.share for point in result.points if point.work == work])
        for work, colour in ((PREFILL, BLUE), (DECODE, ORANGE))
    ]
    bars(axes, names, series)
    frame(axes, below=f"limit: {100 * LIMIT:g}%", grid="y")
    return figure


PLAN = CostsPlan()
QUICK = replace(PLAN, systems=("tiny, torch",), prompt=64, prompts=2, streams=2, output=8, copied=256, repeats=1)
TOPIC = Topic(PLAN, QUICK, measure, CostsResult, section, draw)
