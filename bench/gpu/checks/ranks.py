"""Tensor parallel: two ranks against one, in a child process, because losing a rank ends the leader's process.

python -m bench.gpu.checks.ranks WORK: compares them and reports a check.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from bench.gpu import standins
from bench.gpu.checks.engine import fallbacks, same_loops, same_steps
from bench.gpu.children import Children, Reports, read_work, report
from bench.gpu.engine import Served, StderrLog, served
from bench.gpu.findings import Outcome, Skip
from bench.gpu.shapes import Shape

RANKS = 2
SECONDS = 150.0
SLACK = 2.0
"""Times the tolerance: each rank rounds its part of a sum."""
START_SECONDS, STEP_SECONDS = 120.0, 30.0
CLOSE_SECONDS = 10.0


class RanksWork(NamedTuple):
    model: str
    options: dict[str, Any]
    sizes: Sequence[int]
    """Of the batches; see `same_steps`."""
    requests: Sequence[int]
    """How many, and how long at most; see `same_loops`."""


def check_ranks(work: RanksWork, device: torch.device, children: Children) -> Outcome:
    """Raises Skip with too few GPUs, or without the packages by which ranks communicate."""
    if device.type == "cuda" and (found := torch.cuda.device_count()) < RANKS:
        raise Skip("one GPU" if found == 1 else "no GPU")
    if missing := standins.installed():
        raise Skip(f"no {', '.join(missing)}: ranks communicate by the real ones")
    return _judge(*children.ask(__name__, work._asdict(), SECONDS))


def _judge(reports: Reports, why: str) -> Outcome:
    if not reports:
        return Outcome(False, why or "the process ended without a result")
    found = Outcome(**reports[-1])
    return Outcome(False, f"{found.detail}; {why}") if found.passed and why else found


def main() -> None:
    # Needs the packages that stand-ins replace elsewhere.
    from engine_worker.parallel.leader import Leader
    from engine_worker.parallel.rank_env import RankEnv

    work = RanksWork(**read_work())
    model = Path(work.model)
    shape = Shape.read(model)
    leader = Leader(RankEnv(0, RANKS, 0, RANKS), START_SECONDS, STEP_SECONDS, cast(Any, StderrLog()))

    def load(checkpoint: Any, config: Any, progress: Any) -> Any:
        return leader.load(str(checkpoint.path), checkpoint, config, progress, lambda *_: None)

    with ExitStack() as stack:
        ranks = stack.enter_context(served(shape, model.parent, load, **work.options))
        one = stack.enter_context(served(shape, model.parent, **work.options))
        found = compare(ranks, one, leader.close, work)
        report(**found._asdict())
        if not found.passed:
            # Ranks that do not end would block a regular exit.
            os._exit(1)


def compare(ranks: Served, one: Served, close: Callable[[], None], work: RanksWork) -> Outcome:
    """The same steps, and the same requests through the engine's loop; then `close` within CLOSE_SECONDS."""
    if missing := fallbacks(ranks.runner.choices):
        return Outcome(False, "; ".join(missing.values()))
    count, longest = work.requests
    steps = same_steps(ranks, one, work.sizes, longest, SLACK)
    loops, parted = same_loops(ranks, one, count, longest, SLACK)
    ended = _ends(close, CLOSE_SECONDS)
    detail = (
        f"graphs: {ranks.runner.choices['cuda_graphs']}; step by step {steps.detail}; "
        f"{count} requests, {parted} part at a near-tie; {loops.detail}; "
        f"{'ended' if ended else 'did not end'} within {CLOSE_SECONDS:.0f} s"
    )
    return Outcome(steps.passed and loops.passed and ended, detail)


def _ends(close: Callable[[], None], seconds: float) -> bool:
    """Whether `close` returns in time. Raises what it raises."""
    try:
        ThreadPoolExecutor(1).submit(close).result(seconds)
    except TimeoutError:
        return False
    return True


if __name__ == "__main__":
    main()
