"""A rank on a CPU with fake graphs, as torchrun starts it: `python -m … FOLDER`. Rank 0 prints its results.

Its group must not end while graphs exist: with NCCL that would never return.
"""

import json
import os
import sys
from dataclasses import replace

from engine_worker.attention.choice import ChosenBackend
from engine_worker.parallel.follower import follow
from engine_worker.parallel.group import RankGroup
from engine_worker.parallel.leader import Leader
from engine_worker.parallel.rank_env import read_rank_env
from engine_worker.protocol import Runner
from engine_worker.runner import load
from engine_worker.runner.config import RunnerConfig
from engine_worker.step import Draw, Slice, Step
from sluice.checkpoint.folder import open_checkpoint
from sluice.telemetry.logs import configure
from sluice.wire.params import SamplingParams
from tests.fakes.graphs import WeakCapture
from tests.fakes.paged_attention import PagedTorch

SECONDS = 60.0
STEPS = 12
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14]]
CONFIG = RunnerConfig("cpu", tokens_per_block=4, kv_cache_tokens=128, max_batch_size=5, overlap=True, threads=1)
GREEDY = SamplingParams(temperature=0.0)


def ignore(_done: int, _total: int) -> None:
    """Drop a progress report."""


def generate(runner: Runner) -> list[list[int]]:
    """Tokens of each step. All steps are launched before any is collected; the first sequence ends early."""
    launched, before = [], list(range(3))
    for step in range(STEPS):
        live = [0, 1, 2] if step < 2 else [1, 2]
        slices = []
        for i in live:
            draws = (Draw(GREEDY, 0, step),)
            blocks = range(8 * i, 8 * i + 8)
            if step == 0:
                slices.append(Slice(PROMPTS[i], 0, blocks, draws))
            else:
                slices.append(Slice([0], len(PROMPTS[i]) + step - 1, blocks, draws, before.index(i)))
        before = live
        launched.append(runner.launch(Step(tuple(slices))))
    return [[drawn.token for drawn in step.collect()] for step in launched]


def main() -> None:
    folder, place, log = sys.argv[1], read_rank_env(2, os.environ), configure("rank")
    capture, leave = WeakCapture(), RankGroup.close
    graphs_left: list[int] = []

    def close(group: RankGroup) -> None:
        graphs_left.append(len(capture.alive))
        leave(group)
        if graphs_left[0]:
            raise RuntimeError(f"{graphs_left[0]} graphs still exist")

    RankGroup.close = close
    load.CudaCapture = lambda _: capture
    load.graphs_refused = lambda config, *_: None if config.cuda_graphs else "unwanted"
    load.choose = lambda _, site: ChosenBackend(PagedTorch(site.heads), "it is fake", site.tokens_per_block)
    if place.rank:
        follow(place, SECONDS, log)
    checkpoint = open_checkpoint(folder)
    leader = Leader(place, SECONDS, SECONDS, log)
    runner = leader.load(folder, checkpoint, CONFIG, ignore, ignore)
    report = {"graphs": runner.choices["cuda_graphs"], "tokens": generate(runner)}
    report["replays"] = sum(graph.replays for graph in capture.alive)
    leader.close()
    alone = load.load_runner(checkpoint, replace(CONFIG, cuda_graphs=False), ignore)
    print(json.dumps({**report, "left": graphs_left, "expected": generate(alone)}))
    alone.close()


if __name__ == "__main__":
    main()
