"""A shape with random weights, in memory and ready to run."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import Shape
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from engine_worker.runner.weights import Progress
from engine_worker.step import Runner
from sluice.ring.checkpoint import Checkpoint, open_checkpoint

SEED = 7

Load = Callable[[Checkpoint, RunnerConfig, Progress], Runner]


@dataclass(frozen=True, slots=True)
class Served:
    """A runner, and what a step of it has to read."""

    shape: Shape
    checkpoint: Checkpoint
    config: RunnerConfig
    runner: Runner
    dtype: torch.dtype
    weight_bytes: int
    """That each step reads."""

    @property
    def token_bytes(self) -> int:
        """Of one token in the KV cache."""
        return self.shape.kv_elements * self.dtype.itemsize


@contextmanager
def served(shape: Shape, folder: Path, load: Load = load_runner, **options: Any) -> Iterator[Served]:
    """Loaded with these options of RunnerConfig, and given back. Of a runner of several ranks `weight_bytes` is what
    this one reads."""
    give_back()
    checkpoint = open_checkpoint(str(shape.write(folder)))
    config = RunnerConfig(weights="random", weights_seed=SEED, **options)
    sizes = [0]
    runner = load(checkpoint, config, lambda _, total: sizes.append(total))
    dtype = getattr(torch, runner.choices["dtype"])
    try:
        weight_bytes = sizes[-1] - shape.embedding * dtype.itemsize
        yield Served(shape, checkpoint, config, runner, dtype, weight_bytes)
    finally:
        del runner
        give_back()


def give_back() -> None:
    """Memory of what nobody refers to any more."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
