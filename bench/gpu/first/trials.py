"""Each kernel in its own process: one that breaks the CUDA context, or crashes, affects no other."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.children import Children
from bench.gpu.findings import RUNS, Tried
from bench.gpu.first.trial import BEGUN, FUSED, MARK, TrialPlace
from bench.gpu.scale import Scale
from engine_worker.attention.choice import KERNELS
from engine_worker.attention.reference import ReferenceAttention

ROUNDS = 20
"""Per place: an illegal access may not show at first."""


def places(scale: Scale, dtype: torch.dtype, device: torch.device) -> list[TrialPlace]:
    size = int(scale.small.config["hidden_size"])
    return [TrialPlace(heads, size, windowed, dtype, device) for windowed in (False, True) for heads in scale.heads]


def try_in_child(title: str, given: Iterable[TrialPlace], children: Children, log: Path, seconds: float) -> list[Tried]:
    work = _work(title, list(given))
    command = [sys.executable, "-m", "bench.gpu.first.trial", json.dumps(work)]
    return judge(title, *children.run(command, log, seconds))


def judge(title: str, output: str, why: str) -> list[Tried]:
    found, begun = [], "its start"
    for line in output.splitlines():
        if line.startswith(BEGUN):
            begun = line.removeprefix(BEGUN)
        elif line.startswith(MARK):
            told = json.loads(line.removeprefix(MARK))
            found.append(Tried(title, **told))
            begun = "its end"
    if why:
        found.append(Tried(title, begun, f"its process {why}", crashed=True))
    reasons = {one.ended for one in found}
    if len(reasons) == 1 and all(one.absent for one in found):
        return [Tried(title, "all", reasons.pop(), absent=True)]
    return found


def avoiding(tried: Iterable[Tried]) -> dict[str, Any]:
    tried = list(tried)
    crashed = {one.kernel for one in tried if one.crashed}
    names = {kernel.name for kernel in KERNELS if kernel.title in crashed}
    options: dict[str, Any] = {"fused_kernels": False} if crashed & FUSED else {}
    if names:
        sound = {one.kernel for one in tried} - {one.kernel for one in tried if one.ended != RUNS}
        left = (kernel.name for kernel in KERNELS if kernel.title in sound and kernel.name not in names)
        options["attention"] = next(left, ReferenceAttention.name)
    return options


def _work(title: str, given: list[TrialPlace]) -> dict[str, Any]:
    heads = ((one.heads.num_heads, one.heads.num_kv_heads, one.heads.head_dim) for one in given)
    return {
        "title": title,
        "rounds": ROUNDS,
        "device": str(given[0].device),
        "dtype": str(given[0].dtype).removeprefix("torch."),
        "places": [(shape, one.hidden_size, one.windowed) for shape, one in zip(heads, given, strict=True)],
    }
