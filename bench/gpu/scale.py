"""Sizes of the checks and measurements, and estimates of how long tasks take.

The constants are seconds on an H100 with cold kernel caches: a task is skipped if the remaining budget is smaller. With
one GPU and only torch, Triton and transformers, the tasks before the first peer take about 390 s in total.
"""

from dataclasses import dataclass
from typing import Any

from bench.gpu.shapes import LARGE, SMALL, SPARSE, Shape, Workload, tiny, tiny_sparse
from engine_worker.attention.backend import HeadShape

RATES = 5.0
"""Bandwidth and matrix product. Most of it creates the CUDA context."""
TESTS = 120.0
"""About 60 steps of one layer by each kernel and by the reference; Triton compiles six variants of a kernel for each
head shape and block size."""
LOAD = 30.0
"""First load of a shape: random weights are generated on the GPU, about 60 steps are captured into graphs, and about
ten kernels are compiled: attention, between matrix products, sampling."""
AGAIN = 10.0
"""Later loads of a shape, whose kernels are compiled."""
PARITY = 25.0
LOOPS = 15.0
"""About 600 steps of 10 ms, by two runners."""
MEASURE = 10.0
"""The longest measurement processes 256 prompts of 512 tokens with the large shape."""
TRIAL, DEFAULT = 20.0, 45.0
"""All trials of a kernel; loading and using the default path."""


@dataclass(frozen=True, slots=True)
class Scale:
    small: Shape = SMALL
    """A shape whose steps are bound by kernel launches."""
    large: Shape | None = LARGE
    """A shape whose steps are bound by memory and arithmetic; None: measure only the small shape."""
    sparse: Shape = SPARSE
    """A shape with experts."""
    heads: tuple[HeadShape, ...] = (
        HeadShape(16, 8, 128),
        HeadShape(32, 8, 128),
        HeadShape(14, 2, 64),
        HeadShape(8, 4, 256),
    )
    copied: int = 4 << 30
    """Bytes of the buffer that is copied to measure bandwidth."""
    side: int = 8192
    """Rows and columns of the matrices that are multiplied to measure the device's arithmetic rate."""
    batches: tuple[int, ...] = (1, 16, 64, 256)
    sampled_batches: tuple[int, ...] = (1, 64, 256)
    few_batches: tuple[int, ...] = (1, 64)
    """Batch sizes for the measurements of gaps, joins and other systems."""
    prompt: int = 512
    """Prompt tokens per sequence, where generation is measured."""
    steps: int = 32
    """Steps of a measured window."""
    prompts: tuple[int, int] = (8, 4096)
    """Number of prompts, and tokens of each, for the prompt rate."""
    joining: tuple[int, ...] = (16, 256)
    """Tokens of the prompts that join generating sequences."""
    requests: tuple[int, int] = (48, 300)
    """Number of requests, and the maximum of their prompt and output tokens, in the overlap check."""
    copies: tuple[int, int] = (12, 300)
    """Number of requests, and tokens of their prompts, in the check of copied blocks."""
    copying: tuple[int, int, int] = (256, 64, 32)
    """Sequences, prompt tokens and steps where the cost of copies is measured. The prompts are short, because the host
    pool has to hold all blocks."""
    graph_sizes: tuple[int, ...] = (1, 3, 8, 17, 33, 64)
    parity_lengths: tuple[int, ...] = (5, 64, 130, 333)
    parity_steps: int = 32
    peer_work: tuple[int, int] = (32, 256)
    """Prompt and output tokens of each request when systems are compared."""
    tokens_per_step: int = 8192
    pace: float = 1.0
    """Factor applied to the estimated times of tasks."""

    @property
    def works(self) -> list[Workload]:
        return [Workload(batch, *self.peer_work) for batch in self.few_batches]

    def options(self, batch: int, tokens: int, **others: Any) -> dict[str, Any]:
        """Options of a runner for `batch` sequences of `tokens`, with room for requests that begin or end meanwhile."""
        sizes = {"max_batch_size": batch, "max_tokens_per_step": self.tokens_per_step}
        return sizes | {"kv_cache_tokens": (batch + 1) * (tokens + 256)} | others


FULL = Scale()


def tiny_scale() -> Scale:
    return Scale(
        small=tiny(),
        large=None,
        sparse=tiny_sparse(),
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
        copies=(3, 70),
        copying=(4, 24, 6),
        graph_sizes=(1, 3, 4),
        parity_lengths=(3, 120),
        parity_steps=6,
        peer_work=(8, 16),
        tokens_per_step=256,
        pace=0.1,
    )
