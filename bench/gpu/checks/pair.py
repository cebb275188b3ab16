"""python -m bench.gpu.checks.pair WORK: compares two ranks with one, and prints the result as a line of JSON."""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from bench.gpu.checks.engine import fallbacks, same_loops, same_steps
from bench.gpu.checks.ranks import MARK, RANKS, RanksWork, title
from bench.gpu.engine import Served, StderrLog, served
from bench.gpu.findings import Check
from bench.gpu.shapes import Shape
from engine_worker.parallel.leader import Leader
from engine_worker.parallel.rank_env import RankEnv
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.weights import Progress
from engine_worker.step import Runner
from sluice.ring.checkpoint import Checkpoint

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
