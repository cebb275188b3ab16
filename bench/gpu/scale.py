"""How much is checked and measured, and estimates of how long that takes.

The constants are seconds on an H100 with cold kernel caches: a task is skipped if the remaining budget is smaller. With
one GPU and only torch, Triton and transformers they add up to some 390 s before the first peer.
"""

from dataclasses import dataclass
from typing import Any

from bench.gpu.shapes import LARGE, SMALL, Shape, Workload, tiny
from engine_worker.attention.backend import HeadShape

RATES = 5.0
"""Mostly to create a CUDA context."""
TESTS = 120.0
"""Some 60 steps of one layer by each kernel and by the reference; Triton compiles six variants of a kernel for each
kind of heads and each block size."""
LOAD = 30.0
"""Weights are drawn on the GPU, some sixty steps are captured into graphs, and some ten kernels compiled for the sizes
of a model: attention, between matrix products, sampling."""
AGAIN = 10.0
PARITY = 25.0
LOOPS = 15.0
"""Some 600 steps of 10 ms, twice."""
MEASURE = 10.0
"""The longest reads 256 prompts of 512 tokens by the large shape."""
TRIAL, DEFAULT = 20.0, 45.0
"""A kernel's trials; loading and using the default path."""


@dataclass(frozen=True, slots=True)
class Scale:
    small: Shape = SMALL
    """Bound by launches."""
    large: Shape | None = LARGE
    """Bound by memory and arithmetic; None: only the small one."""
    heads: tuple[HeadShape, ...] = (
        HeadShape(16, 8, 128),
        HeadShape(32, 8, 128),
        HeadShape(14, 2, 64),
        HeadShape(8, 4, 256),
    )
    copied: int = 4 << 30
    side: int = 8192
    batches: tuple[int, ...] = (1, 16, 64, 256)
    sampled_batches: tuple[int, ...] = (1, 64, 256)
    few_batches: tuple[int, ...] = (1, 64)
    """To measure gaps, and requests side by side."""
    prompt: int = 512
    steps: int = 32
    prompts: tuple[int, int] = (8, 4096)
    """How many, and how long, to measure the prompt rate."""
    joining: tuple[int, ...] = (16, 256)
    """Tokens of prompts that join sequences that generate."""
    requests: tuple[int, int] = (48, 300)
    """How many, and how long at most, of the overlap check."""
    graph_sizes: tuple[int, ...] = (1, 3, 8, 17, 33, 64)
    parity_lengths: tuple[int, ...] = (5, 64, 130, 333)
    parity_steps: int = 32
    peer_work: tuple[int, int] = (32, 256)
    """Prompt and output tokens of each request side by side."""
    tokens_per_step: int = 8192
    pace: float = 1.0
    """Factor on the estimated times of tasks."""

    @property
    def works(self) -> list[Workload]:
        return [Workload(batch, *self.peer_work) for batch in self.few_batches]

    def options(self, batch: int, tokens: int, **others: Any) -> dict[str, Any]:
        """Of a runner for `batch` sequences of `tokens`, with room for requests that begin or end meanwhile."""
        sizes = {"max_batch_size": batch, "max_tokens_per_step": self.tokens_per_step}
        return sizes | {"kv_cache_tokens": (batch + 1) * (tokens + 256)} | others


FULL = Scale()


def tiny_scale() -> Scale:
    return Scale(
        small=tiny(),
        large=None,
        heads=(HeadShape(4, 2, 64), HeadShape(2, 2, 32)),
        copied=32 << 20,
        side=512,
        batches=(1, 4),
        sampled_batches=(1, 4),
        few_batches=(1, 4),
        prompt=24,
        steps=6,
        prompts=(2, 128),
        joining=(5,),
        requests=(6, 40),
        graph_sizes=(1, 3, 4),
        parity_lengths=(3, 120),
        parity_steps=6,
        peer_work=(8, 16),
        tokens_per_step=256,
        pace=0.1,
    )
