"""Adapters on two ranks: python -m tests.engine_worker.lora.two_ranks FOLDER

Runs in a subprocess, because losing a rank ends the leader's process. Prints the largest difference of
log-probabilities from peft's.
"""

import os
import sys
from pathlib import Path
from typing import Any, cast

from bench.gpu.engine import StderrLog
from engine_worker.runner.config import RunnerConfig
from tests.engine_worker.lora.engines import finish, submit
from tests.engine_worker.lora.oracle import MLP, Oracle, adapter_of, write_adapter
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint
from tests.fakes.engine import EngineBench

RANKS = 2


def main() -> None:
    from engine_worker.parallel.leader import Leader
    from engine_worker.parallel.rank_env import RankEnv

    model = Path(sys.argv[1]) / "model"
    write_checkpoint(model, CONFIGS["qwen3, tied"])
    folders = [
        write_adapter(model.parent / "all", model, 1, rank=12),
        write_adapter(model.parent / "mlp", model, 2, rank=3, targets=MLP),
        write_adapter(model.parent / "o", model, 3, rank=40, targets=("o_proj", "k_proj")),
        None,
    ]
    config = RunnerConfig(
        lora=True, lora_folders=(str(model.parent),), lora_num_device_module_layer=8 * 40, kv_cache_tokens=2048,
        max_tokens_per_step=32, device="cpu", threads=1,
    )  # fmt: skip
    leader = Leader(RankEnv(0, RANKS, 0, RANKS), 120.0, 30.0, cast(Any, StderrLog()))
    runner = leader.load(str(model), open_written(model), config, lambda *_: None, lambda *_: None)
    bench = EngineBench(runner=runner, max_sequence_tokens=400, max_tokens_per_step=32)
    oracle = Oracle(model)
    submitted = {}
    for i in range(8):
        prompt, folder = [(i * 31 + j * j) % 97 for j in range(9 + 5 * i)], folders[i % 4]
        adapter = None if folder is None else adapter_of(folder)
        submitted[submit(bench, prompt, adapter, logprobs=0)] = oracle.greedy(folder, prompt, 8)
    finish(bench)
    largest = 0.0
    for number, (tokens, scores) in submitted.items():
        stream = bench.stream(number)
        assert stream.tokens == tokens, (number, stream.tokens, tokens)
        largest = max(
            largest, *(abs(logprob.logprob - score) for logprob, score in zip(stream.logprobs, scores, strict=True))
        )
    print(f"difference {largest:.1e}", flush=True)
    leader.close()
    if largest > 1e-3:
        os._exit(1)


if __name__ == "__main__":
    main()
