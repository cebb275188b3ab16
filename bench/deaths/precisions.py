"""Streams of a real model in each precision while services are killed."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure

from bench.deaths import streams
from bench.deaths.kills import KillPlan, KillResult, kill_and_compare
from bench.deaths.requests import ANY_MODEL, StreamRequest, in_turns
from bench.harness.real_model import real_gguf, real_model
from bench.harness.style import BLUE, GREY, INK, ORANGE, SOFT, TEAL, Series, canvas, distribution
from bench.harness.tables import Section, table
from bench.harness.topic import Plan, Step, Topic
from sluice.gguf.folder import gguf_folder

PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, u8 KV": {"quantize": "int8", "kv_precision": "u8"},
    "Q4_1": {},
}
"""Settings of the engines. bfloat16 needs a CPU with instructions for it."""
STORED = "Q4_1"
"""The precision in which the model is a GGUF file, with which the engine computes as it is."""
SEVERAL_AT_ONCE = "int8, u8 KV"
"""The precision in which tokens that are computed together, as draft tokens are, have other bits than alone."""


def model_of(precision: str) -> Path:
    """SmolLM2-135M-Instruct."""
    return gguf_folder(str(real_gguf())) if precision == STORED else real_model()


class PrecisionPlan(Plan, frozen=True):
    kills: KillPlan
    precisions: tuple[str, ...]

    def requests(self, precision: str) -> list[StreamRequest]:
        kinds = {
            kind: options
            for kind, options in ANY_MODEL.items()
            if precision != SEVERAL_AT_ONCE or "speculation" not in options
        }
        return in_turns(kinds, self.kills.streams, self.kills.max_tokens)


class PrecisionResult(msgspec.Struct, frozen=True):
    plan: PrecisionPlan
    precisions: dict[str, KillResult]


def measure(plan: PrecisionPlan, _folder: Path, step: Step) -> PrecisionResult:
    kills, found = msgspec.structs.replace(plan.kills, threads=plan.threads), {}
    for precision in plan.precisions:
        on_step, requests = _named(step, precision), plan.requests(precision)
        with kills.ring(PRECISIONS[precision], model=model_of(precision)) as ring:
            found[precision] = asyncio.run(kill_and_compare(ring, kills, requests, on_step))
    return PrecisionResult(plan, found)


def _named(step: Step, precision: str) -> Step:
    return lambda done: step(f"{precision}: {done}")


def section(result: PrecisionResult) -> Section:
    kills = result.plan.kills
    wrong = sum(found.failed + found.wrong for found in result.precisions.values())
    total = sum(found.streams for found in result.precisions.values())
    rows = [
        f"{name} | {len(found.deaths)} | {found.streams} | {found.failed} | {found.wrong} | {found.resumed} | "
        f"{streams.wait_cells(found.first, found.stall)}"
        for name, found in result.precisions.items()
    ]
    return Section(
        "Streams of a real model while services die, by precision",
        f"SmolLM2-135M-Instruct, {kills.streams} continuous streams of every kind that suits any model, through "
        f"{kills.routers} routers, {kills.engines} engines and {kills.detokenizers} detokenizers; every "
        f"{kills.seconds_between:g} s a random service gets SIGKILL. Each stream is compared with its undisturbed run: "
        "text, token ids, logprobs, finish reason, usage.",
        [f"**{wrong} of {total} streams** failed or differed."],
        [
            table(
                "precision | kills | streams | failed | wrong | continued at another router | first token p50, ms | "
                "p99 | longest pause p50, ms | p99",
                rows,
            )
        ],
    )


def draw(result: PrecisionResult) -> Figure:
    figure, ((first, stall),) = canvas(
        (1, 2), (12, 4.8), "A real model while services die", "Distributions of each stream's longest wait."
    )
    colours = dict(zip(PRECISIONS, (GREY, BLUE, TEAL, ORANGE, INK, SOFT), strict=True))
    for axes, name, times in (
        (first, "First token", {each: found.first for each, found in result.precisions.items()}),
        (stall, "Longest pause", {each: found.stall for each, found in result.precisions.items()}),
    ):
        distribution(axes, name, "s", [Series(each, colours[each], found) for each, found in times.items()])
    return figure


KILLS = KillPlan(24, 160, kills=12, seconds_between=10.0, seed=11)
"""Kills are less frequent than with the bundled model, because an engine takes longer to start."""
QUICK = PrecisionPlan(KillPlan(6, 40, kills=2, seconds_between=4.0), ("int8",))
TOPIC = Topic(PrecisionPlan(KILLS, tuple(PRECISIONS)), QUICK, measure, PrecisionResult, section, draw)
