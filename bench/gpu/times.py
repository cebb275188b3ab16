"""Estimated seconds of tasks on an H100 with cold kernel caches: a task is skipped if the remaining budget is smaller.

With one GPU and only torch, Triton and transformers they add up to some 390 s before the first peer; on a slower GPU
the last tasks are skipped.
"""

from bench.gpu.scale import Scale
from bench.gpu.shapes import Shape, Workload

COMPILE = 1.5
VARIANTS = 6
"""Kernels compiled per head shape and block size in the attention checks: generation with split keys, generation
without, and context; each with a window and without."""
RATES = 5.0
"""Mostly to create a CUDA context."""
LIBRARY = 10.0
"""A check of a precompiled kernel: some 70 steps of one layer, and as many by the reference."""
LOAD = 30.0
"""Weights are drawn on the GPU, some sixty steps are captured into graphs, and some ten kernels compiled for the sizes
of a model: attention, between matrix products, sampling."""
AGAIN = 10.0
PARITY = 25.0
RANKS = 75.0
"""Two processes import torch and connect; kernels are compiled for half the number of heads."""
LOOPS = 15.0
"""Some 600 steps of 10 ms, twice."""
PRODUCT = 2e14
SETTLE = 2.0
"""Around a measurement: requests submitted and stopped, garbage collected."""
PROFILE = 2.0
STEP = 0.01


def attention(scale: Scale, compiles: bool) -> float:
    return LIBRARY + compiles * COMPILE * VARIANTS * len(scale.heads) * len(scale.pages)


def generation(shape: Shape, batch: int, prompt: int) -> float:
    return SETTLE + context(shape, batch, prompt) + 100 * STEP


def context(shape: Shape, prompts: int, tokens: int) -> float:
    return 2 * shape.matrices * prompts * tokens / PRODUCT


def throughput(work: Workload) -> float:
    return SETTLE + 2 * work.output_tokens * STEP
