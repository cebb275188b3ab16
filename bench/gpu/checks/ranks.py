"""Tensor parallel: two ranks against one, in a child process, because losing a rank ends the leader's process."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu import standins
from bench.gpu.children import Children
from bench.gpu.findings import Check, Skip
from bench.gpu.shapes import Shape

RANKS = 2
SECONDS = 150.0
MARK = "checked: "
"""Prefix of its line of JSON: libraries print too."""


@dataclass(frozen=True, slots=True)
class RanksWork:
    model: str
    options: dict[str, Any]
    sizes: tuple[int, ...]
    """Of the batches; see `same_steps`."""
    requests: tuple[int, int]
    """How many, and how long at most; see `same_loops`."""


def title(shape: str) -> str:
    return f"{RANKS} ranks = one, {shape}"


def check_ranks(
    shape: Shape,
    folder: Path,
    device: torch.device,
    options: dict[str, Any],
    sizes: tuple[int, ...],
    requests: tuple[int, int],
    children: Children,
) -> Check:
    """`folder`: scratch space. Raises Skip with too few GPUs, or without the packages by which ranks communicate."""
    if device.type == "cuda" and (found := torch.cuda.device_count()) < RANKS:
        raise Skip("one GPU" if found == 1 else "no GPU")
    if missing := standins.installed():
        raise Skip(f"no {', '.join(missing)}: ranks communicate by the real ones")
    work = RanksWork(str(shape.write(folder)), options | {"device": device.type}, sizes, requests)
    command = [sys.executable, "-m", "bench.gpu.checks.pair", json.dumps(asdict(work))]
    output, why = children.run(command, folder / "ranks.log", SECONDS)
    return _judge(title(shape.name), output, why)


def _judge(name: str, output: str, why: str) -> Check:
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        return Check(name, passed=False, detail=why or "the process ended without a result")
    told = Check(**json.loads(lines[-1].removeprefix(MARK)))
    return replace(told, passed=False, detail=f"{told.detail}; {why}") if told.passed and why else told
