"""Tensor parallel: two ranks against one, in a process of their own, for whoever loses a rank ends with it."""

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
"""For that process, at most."""
MARK = "checked: "
"""Before its line of JSON: libraries print too."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is compared."""

    model: str
    """Folder."""
    options: dict[str, Any]
    """Of RunnerConfig."""
    sizes: tuple[int, ...]
    """Of the batches; see `checks.steps`."""
    requests: tuple[int, int]
    """How many, and how long at most; see `checks.overlap`."""


def title(shape: str) -> str:
    """Of the check."""
    return f"{RANKS} ranks = one, {shape}"


def check(
    shape: Shape,
    folder: Path,
    device: torch.device,
    options: dict[str, Any],
    sizes: tuple[int, ...],
    requests: tuple[int, int],
    children: Children,
) -> Check:
    """`folder`: for scratch. Raises Skip where there are too few GPUs, or where a package is missing that ranks speak
    with."""
    if device.type == "cuda" and (found := torch.cuda.device_count()) < RANKS:
        raise Skip("one GPU" if found == 1 else "no GPU")
    if missing := standins.installed():
        raise Skip(f"no {', '.join(missing)}: ranks speak with each other by the real ones")
    work = Work(str(shape.write(folder)), options | {"device": device.type}, sizes, requests)
    command = [sys.executable, "-m", "bench.gpu.checks.pair", json.dumps(asdict(work))]
    output, why = children.run(command, folder / "ranks.log", SECONDS)
    return _judge(title(shape.name), output, why)


def _judge(name: str, output: str, why: str) -> Check:
    """Of what the process wrote, and how it ended."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        return Check(name, passed=False, detail=why or "the process ended and said nothing")
    told = Check(**json.loads(lines[-1].removeprefix(MARK)))
    return replace(told, passed=False, detail=f"{told.detail}; {why}") if told.passed and why else told
