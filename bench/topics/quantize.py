"""What the settings `quantize` and `kv_precision` lose, on a model that people use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace
from safetensors.torch import load_file

from bench.harness.models import python_prompts, write_rounded, write_shuffled
from bench.harness.quality import Quality, log_probabilities, quality
from bench.harness.real_model import real_model
from bench.harness.style import ORANGE, Series, bars, canvas, frame
from bench.harness.tables import Section, table
from bench.harness.topic import Plan, Step, Topic
from engine_worker.formats.rounding_error import BOUND, RoundingError
from engine_worker.openvino.compiled import has_bfloat16
from sluice.checkpoint.weight_files import SINGLE

PLAIN = "float32"


class Side(NamedTuple):
    settings: Mapping[str, Any]
    quantize: str = "none"
    """How the weights are rounded before they are loaded: activations then are not, as on a GPU."""


SIDES: Mapping[str, Side] = {
    PLAIN: Side({}),
    "float32, u8 KV": Side({"kv_precision": "u8"}),
    "bfloat16": Side({"dtype": "bfloat16"}),
    "int8": Side({"quantize": "int8"}),
    "int8, u8 KV": Side({"quantize": "int8", "kv_precision": "u8"}),
    "int4": Side({"quantize": "int4"}),
    "int8, GPU": Side({}, "int8"),
    "fp8, GPU": Side({}, "fp8"),
    "int4, GPU": Side({}, "int4"),
}


class QuantizePlan(Plan, frozen=True, kw_only=True):
    sides: tuple[str, ...] = tuple(SIDES)
    texts: int = 16
    length: int = 192
    """Tokens of each text."""


class Loss(msgspec.Struct, frozen=True):
    side: str
    error: float
    """By which the weights change, relative to their size: what an engine's warning is about."""
    perplexity: float
    divergence: float
    same: float


class QuantizeResult(msgspec.Struct, frozen=True):
    plan: QuantizePlan
    losses: list[Loss]


def measure(plan: QuantizePlan, folder: Path, step: Step) -> QuantizeResult:
    model = write_shuffled(real_model(), folder / "shuffled")
    texts = python_prompts(model, plan.texts, plan.length)
    settings = {"backend": "openvino", "threads": plan.threads}
    reference, losses = log_probabilities(model, settings, texts), []
    for side in plan.sides:
        own, quantize = SIDES[side]
        if own.get("dtype") == "bfloat16" and not has_bfloat16():
            continue
        rounded = model if quantize == "none" else write_rounded(model, folder / quantize, quantize)
        found: Quality = quality(reference, log_probabilities(rounded, {**settings, **own}, texts), texts)
        losses.append(Loss(side, _error(model, own.get("quantize", quantize)), *found))
        step(side)
    return QuantizeResult(plan, losses)


def _error(model: Path, quantize: str) -> float:
    error = RoundingError(quantize)
    for name, weight in load_file(model / SINGLE).items():
        error.add(name, weight)
    return error.mean


def section(result: QuantizeResult) -> Section:
    plan, losses = result.plan, {loss.side: loss for loss in result.losses}
    answers = [
        f"With `quantize = {side}` on a CPU, **{losses[side].same:.1%}** of the tokens are those of float32."
        for side in ("int8", "int4")
        if side in losses
    ]
    rows = [
        f"{loss.side} | {loss.error:.1%} | {loss.perplexity:.3f} | {max(loss.divergence, 0.0):.2g} | {loss.same:.1%}"
        for loss in result.losses
    ]
    return Section(
        "What rounded weights lose",
        f"SmolLM2-135M-Instruct, the engine in process, {plan.texts} texts of {plan.length} tokens (Python): by how "
        f"much the weights change (an engine warns from {BOUND:.0%} on), the perplexity, the Kullback-Leibler "
        "divergence from float32 per token, and the tokens for which both choose the same. The units of the model are "
        "shuffled, which does not change its function, because its weights come from a file with groups of 32. `GPU`: "
        "weights as the kernels for GPUs have them, activations exact, computed on a CPU; on CPUs activations are "
        "rounded, too. A small model loses more than a large one.",
        answers,
        [table("| weights change by | perplexity | divergence | same token", rows)],
    )


def draw(result: QuantizeResult) -> Figure:
    about = (
        f"{result.plan.texts} texts of {result.plan.length} tokens. Tokens that are not those of float32, in per cent."
    )
    figure, ((axes,),) = canvas((1, 1), (9, 4.2), "What rounded weights lose", about)
    shown = [loss for loss in result.losses if loss.side != PLAIN]
    bars(
        axes,
        [loss.side for loss in shown],
        [Series("other tokens, %", ORANGE, [100 * (1 - loss.same) for loss in shown])],
    )
    frame(axes, grid="y")
    return figure


PLAN = QuantizePlan()
QUICK = replace(PLAN, sides=("int8", "int4", "fp8, GPU"), texts=2, length=40)
TOPIC = Topic(PLAN, QUICK, measure, QuantizeResult, section, draw)
