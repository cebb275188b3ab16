"""A GGUF file as it is, beside llama.cpp on the same file, and beside int8 and int4 of its values."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from matplotlib.figure import Figure
from msgspec.structs import replace

from bench.harness.children import SystemProcess
from bench.harness.load import Load, PlannedRequest, System
from bench.harness.memory import MEBIBYTE, resident_bytes
from bench.harness.models import python_prompts
from bench.harness.quality import Quality, log_probabilities, perplexity, quality
from bench.harness.real_model import real_gguf, real_model
from bench.harness.stats import rate, ratio
from bench.harness.style import BLUE, ORANGE, Series, bars, canvas, frame
from bench.harness.tables import Section, number, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave
from bench.peers.catalog import LLAMA
from bench.systems.engine_alone import engine_alone
from sluice.checkpoint.weight_files import GGUF
from sluice.gguf.folder import gguf_folder

ONE_GOAL, MANY_GOAL, PERPLEXITY_GOAL = 0.95, 2.0, 0.01
"""Lowest acceptable speeds, divided by llama.cpp's on the same file, and the highest acceptable loss."""
STORED, EXACT, INT8, INT4, PEER = "as stored", "as stored, activations exact", "int8", "int4", "llama.cpp"
SIDES: Mapping[str, tuple[bool, dict[str, Any]]] = {
    STORED: (True, {}),
    EXACT: (True, {"quantized_activations": False}),
    INT8: (False, {"quantize": "int8"}),
    INT4: (False, {"quantize": "int4"}),
}
"""Whether the engine serves the file, or the values that it stands for in bfloat16, and its settings."""


class GgufPlan(Plan, frozen=True, kw_only=True):
    streams: tuple[int, ...] = (1, 32)
    prompt: int = 64
    output: int = 128
    kv_cache_tokens: int = 16_384
    texts: int = 8
    length: int = 128
    """Tokens of each text, of which the quality is measured."""
    repeats: int = 5


class GgufPoint(msgspec.Struct, frozen=True):
    side: str
    speeds: list[float]
    """Output tokens per second by number of streams."""
    by_peer: list[float]
    """Divided by llama.cpp's: median of the rounds. Empty without it."""
    memory: float
    """Resident MiB after the runs, with the KV cache."""
    perplexity: float | None
    """None for the peer, and `divergence` and `same` too."""
    divergence: float | None
    """Mean Kullback-Leibler divergence from transformers, in nats."""
    same: float | None
    """Fraction of the tokens for which it would choose the token that transformers chooses."""


class GgufResult(msgspec.Struct, frozen=True):
    plan: GgufPlan
    points: list[GgufPoint]
    perplexity: float
    """Of transformers, which computes with the file's values in float32."""


def measure(plan: GgufPlan, logs: Path, step: Step) -> GgufResult:
    file = gguf_folder(str(real_gguf()))
    texts = python_prompts(file, plan.texts, plan.length)
    reference = _reference(texts)
    step("the perplexity of transformers")
    measured: dict[str, Quality] = {}
    for side, (is_file, settings) in SIDES.items():
        found = log_probabilities(file if is_file else real_model(), {"threads": plan.threads, **settings}, texts)
        measured[side] = quality(reference, found, texts)
        step(f"the perplexity of {side}")
    with ExitStack() as stack:
        systems = {side: stack.enter_context(system) for side, system in _systems(plan, file, logs)}
        speeds = {streams: _speeds(plan, systems, _load(plan, file, streams), step) for streams in plan.streams}
        memory = {side: resident_bytes(system.pid) / MEBIBYTE for side, system in systems.items()}
    points = [
        GgufPoint(
            side,
            [statistics.median(map(rate, runs[side])) for runs in speeds.values()],
            [ratio(runs[side], runs[PEER]) for runs in speeds.values() if PEER in runs],
            memory[side],
            *measured.get(side, (None, None, None)),
        )
        for side in systems
    ]
    return GgufResult(plan, points, perplexity(reference, texts))


def _systems(plan: GgufPlan, file: Path, logs: Path) -> Iterator[tuple[str, SystemProcess]]:
    if LLAMA.is_installed:
        folder = logs / "llama.cpp"
        folder.mkdir()
        (folder / GGUF).symlink_to((file / GGUF).resolve())
        config = json.loads((file / "config.json").read_text(encoding="utf-8"))
        # Of the KV cache and its types: llama.cpp's defaults.
        (folder / "config.json").write_text(json.dumps(config | {"precision": "int8"}), encoding="utf-8")
        options = ["serve", str(folder), str(plan.threads), str(max(plan.streams))]
        yield PEER, SystemProcess(PEER, LLAMA.module, options, logs / "llama.log", python=LLAMA.python)
    for side, (is_file, own) in SIDES.items():
        settings = engine_settings(plan.threads, kv_cache_tokens=plan.kv_cache_tokens, **own)
        yield side, engine_alone(file if is_file else real_model(), settings, logs)


def _load(plan: GgufPlan, file: Path, streams: int) -> Load:
    prompts = python_prompts(file, streams, plan.prompt)
    return Load([PlannedRequest(prompt, plan.output) for prompt in prompts], streams, salt=f"{streams}")


def _speeds(plan: GgufPlan, systems: Mapping[str, System], load: Load, step: Step) -> dict[str, list[Any]]:
    sides = {f"{side}, {load.width} streams": (system, load) for side, system in systems.items()}
    return dict(zip(systems, interleave(sides, plan.repeats, step), strict=True))


@torch.inference_mode()
def _reference(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, GgufConfig

    file = real_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return torch.stack([model(torch.tensor([list(text)])).logits[0].log_softmax(-1) for text in texts])


def section(result: GgufResult) -> Section:
    plan = result.plan
    points = {point.side: point for point in result.points}
    stored = points[STORED]
    loss = (stored.perplexity or math.nan) / result.perplexity - 1
    answers = [
        f"As stored, the perplexity differs from that of transformers by **{loss:+.2%}** (goal: {PERPLEXITY_GOAL:.0%})."
    ]
    if stored.by_peer:
        pairs = zip(plan.streams, stored.by_peer, strict=True)
        speeds = " and ".join(f"{speed:.2f}× with {streams} streams" for streams, speed in pairs)
        answers.append(
            f"As stored, the engine has **{speeds}** of llama.cpp's speed on the same file (goals: {ONE_GOAL}× with "
            f"one and {MANY_GOAL}× with 32)."
        )
    columns = " | ".join(f"tokens/s, {streams} streams | / llama.cpp" for streams in plan.streams)
    rows = []
    for point in result.points:
        ratios = point.by_peer or [math.nan] * len(point.speeds)
        cells = " | ".join(
            f"{number(speed)} | {'' if math.isnan(by) else f'{by:.2f}×'}"
            for speed, by in zip(point.speeds, ratios, strict=True)
        )
        quality = f"{point.perplexity:.3f} | {point.divergence:.2g} | {point.same:.1%}" if point.perplexity else " | | "
        rows.append(f"{point.side} | {cells} | {number(point.memory)} | {quality}")
    return Section(
        "A GGUF file as it is",
        "SmolLM2-135M-Instruct in Q4_1: the engine in process, and llama.cpp's library with a loop that batches like "
        f"its server. Prompts of {plan.prompt} tokens, {plan.output} output tokens. int8 and int4: the file's values "
        "in bfloat16, quantized at load. Perplexity, divergence from transformers (which has "
        f"{result.perplexity:.3f}) and the tokens for which both choose the same: {plan.texts} texts of {plan.length} "
        "tokens.",
        answers,
        [table(f"| {columns} | resident MiB | perplexity | divergence | same token", rows)],
    )


def draw(result: GgufResult) -> Figure:
    about = "Output tokens per second, divided by llama.cpp's on the same file, or as they are without it."
    figure, ((axes,),) = canvas((1, 1), (8, 4.8), "A GGUF file as it is", about)
    sides = [point.side for point in result.points if point.side != PEER]
    shown = [point.by_peer or point.speeds for point in result.points if point.side != PEER]
    series = [
        Series(f"{streams} streams", colour, [values[index] for values in shown])
        for index, (streams, colour) in enumerate(zip(result.plan.streams, (BLUE, ORANGE), strict=False))
    ]
    bars(axes, sides, series)
    frame(axes, grid="y")
    return figure


PLAN = GgufPlan()
QUICK = replace(PLAN, streams=(1, 2), prompt=16, output=4, texts=2, length=40, repeats=1)
TOPIC = Topic(PLAN, QUICK, measure, GgufResult, section, draw)
