"""Compares two ranks with one, on two GPUs or on CPUs: the same steps, the same requests through the engine's loop, and
a shutdown within seconds.

python -m tests.engine_worker.parallel.two_ranks FOLDER prints the comparison; exit status 1 if the results differ. Runs
in a subprocess, because losing a rank ends the leader's process.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from bench.gpu.checks import fallbacks, same_loops, same_steps
from bench.gpu.engine import Served, StderrLog, served
from bench.gpu.findings import Outcome
from bench.gpu.scale import FULL, tiny_scale

RANKS = 2
SLACK = 2.0
"""Factor on the tolerance, since each rank rounds its part of a sum."""
START_SECONDS, STEP_SECONDS, CLOSE_SECONDS = 120.0, 60.0, 60.0


def main() -> None:
    # Imported here because it needs packages that bench.gpu replaces by stand-ins elsewhere.
    from engine_worker.parallel.leader import Leader
    from engine_worker.parallel.rank_env import RankEnv

    folder, on_gpu = Path(sys.argv[1]), torch.cuda.is_available()
    scale, sizes = (FULL, FULL.graph_sizes) if on_gpu else (tiny_scale(), (1, 3))
    options = scale.options(
        max(sizes), scale.prompt + sum(scale.requests), device="cuda" if on_gpu else "cpu", overlap=True
    )
    leader = Leader(RankEnv(0, RANKS, 0, RANKS), START_SECONDS, STEP_SECONDS, cast(Any, StderrLog()))

    def load(checkpoint: Any, config: Any, progress: Any) -> Any:
        return leader.load(str(checkpoint.path), checkpoint, config, progress, lambda *_: None)

    with ExitStack() as stack:
        ranks = stack.enter_context(served(scale.small, folder, load, **options))
        single = stack.enter_context(served(scale.small, folder, **options))
        verdict = compare(ranks, single, leader.close, sizes, scale.requests)
        print(verdict.detail, flush=True)
        if not verdict.passed:
            # Ranks that do not end would block a normal exit.
            os._exit(1)


def compare(
    ranks: Served, single: Served, close: Callable[[], None], sizes: tuple[int, ...], requests: tuple[int, int]
) -> Outcome:
    if missing := fallbacks(ranks.runner.choices):
        return Outcome(False, "; ".join(missing.values()))
    count, longest = requests
    steps = same_steps(ranks, single, sizes, longest, SLACK)
    loops, parted = same_loops(ranks, single, count, longest, SLACK)
    ended = _ends(close, CLOSE_SECONDS)
    detail = (
        f"graphs: {ranks.runner.choices['cuda_graphs']}; step by step {steps.detail}; "
        f"{count} requests, {parted} part at a near-tie; {loops.detail}; "
        f"{'ended' if ended else 'did not end'} within {CLOSE_SECONDS:.0f} s"
    )
    return Outcome(steps.passed and loops.passed and ended, detail)


def _ends(close: Callable[[], None], seconds: float) -> bool:
    """Whether `close` returns in time. Raises the exceptions of `close`."""
    try:
        ThreadPoolExecutor(1).submit(close).result(seconds)
    except TimeoutError:
        return False
    return True


if __name__ == "__main__":
    main()
