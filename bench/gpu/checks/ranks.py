"""Tensor parallel: two ranks against one, in a child process, because losing a rank ends the leader's process.

python -m bench.gpu.checks.ranks WORK: compares them, and prints the result as a line of JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from bench.gpu import standins
from bench.gpu.checks.engine import fallbacks, same_loops, same_steps
from bench.gpu.children import Children
from bench.gpu.engine import Served, StderrLog, served
from bench.gpu.findings import Check, Skip
from bench.gpu.shapes import Shape
from engine_worker.parallel.leader import Leader
from engine_worker.parallel.rank_env import RankEnv
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.weights import Progress
from engine_worker.step import Runner
from sluice.ring.checkpoint import Checkpoint

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
    command = [sys.executable, "-m", "bench.gpu.checks.ranks", json.dumps(asdict(work))]
    output, why = children.run(command, folder / "ranks.log", SECONDS)
    return _judge(title(shape.name), output, why)


def _judge(name: str, output: str, why: str) -> Check:
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        return Check(name, passed=False, detail=why or "the process ended without a result")
    told = Check(**json.loads(lines[-1].removeprefix(MARK)))
    return replace(told, passed=False, detail=f"{told.detail}; {why}") if told.passed and why else told


SLACK = 2.0
"""Times the tolerance: each rank rounds its part of a sum."""
START_SECONDS, STEP_SECONDS = 120.0, 30.0
CLOSE_SECONDS = 10.0


def main() -> None:
    given = json.loads(sys.argv[1])
    work = RanksWork(given["model"], given["options"], tuple(given["sizes"]), tuple(given["requests"]))
    with ExitStack() as stack:
        found = pair(work, stack)
        print(MARK + json.dumps(asdict(found)), flush=True)
        if not found.passed:
            # Ranks that do not end would block a regular exit.
            os._exit(1)


def pair(work: RanksWork, stack: ExitStack) -> Check:
    model = Path(work.model)
    shape, folder = Shape.read(model), model.parent
    leader = Leader(RankEnv(0, RANKS, 0, RANKS), START_SECONDS, STEP_SECONDS, cast(Any, StderrLog()))

    def load(checkpoint: Checkpoint, config: RunnerConfig, progress: Progress) -> Runner:
        return leader.load(str(checkpoint.path), checkpoint, config, progress, lambda *_: None)

    ranks = stack.enter_context(served(shape, folder, load, **work.options))
    one = stack.enter_context(served(shape, folder, **work.options))
    return compare(ranks, one, leader.close, work)


def compare(ranks: Served, one: Served, close: Callable[[], None], work: RanksWork) -> Check:
    """The same steps, and the same requests through the engine's loop; then `close` within CLOSE_SECONDS."""
    name = title(ranks.shape.name)
    if missing := fallbacks(ranks.runner.choices):
        return Check(name, passed=False, detail="; ".join(missing.values()))
    steps = same_steps(ranks, one, work.sizes, work.requests[1], SLACK)
    loops, parted = same_loops(ranks, one, *work.requests, SLACK)
    ended = ends(close, CLOSE_SECONDS)
    detail = (
        f"graphs: {ranks.runner.choices['cuda_graphs']}; step by step {steps}; "
        f"{work.requests[0]} requests, {parted} part at a near-tie; {loops}; "
        f"{'ended' if ended else 'did not end'} within {CLOSE_SECONDS:.0f} s"
    )
    return Check(name, steps.passed and loops.passed and ended, detail)


def ends(close: Callable[[], None], seconds: float) -> bool:
    """Whether `close` returns in time. Raises what it raises."""
    try:
        ThreadPoolExecutor(1).submit(close).result(seconds)
    except TimeoutError:
        return False
    return True


if __name__ == "__main__":
    main()
