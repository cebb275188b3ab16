"""About how long tasks take on an H100, with nothing compiled before: what is left of the budget decides by it whether
one is begun. With one GPU and no package but torch, Triton and transformers they come to some 380 s before any peer is
asked; on a slower GPU the last are left out.
"""

from bench.gpu.scale import Scale
from bench.gpu.shapes import Shape
from bench.gpu.workload import Workload

COMPILE = 1.5
"""Triton, for one kernel."""
VARIANTS = 6
"""Kernels that it compiles per heads and size of a block in the attention checks: of generation rows whose keys are
split, of those whose keys are not, and of context; each with a window and without."""
RATES = 5.0
"""Most of it to make a CUDA context."""
LIBRARY = 10.0
"""A check by a kernel that needs no compiler: some 70 steps of one layer, and as many by the reference."""
LOAD = 30.0
"""Weights are drawn on the GPU; then some sixty steps run on their way into graphs. Some ten kernels are compiled for
the sizes of a model: of attention, of what lies between matrix products, of sampling."""
AGAIN = 10.0
"""To load a shape once more."""
PARITY = 25.0
"""transformers is imported and makes its model, twice; the tokens themselves take a second or two."""
RANKS = 75.0
"""Two processes that import torch and connect; heads of half the number are compiled for."""
LOOPS = 15.0
"""Some 600 steps of 10 ms, twice."""
PRODUCT = 2e14
"""Operations per second in prompts, at least."""
SETTLE = 2.0
"""Around a window of generation steps: requests in and out, garbage collected."""
PROFILE = 2.0
"""By the profiler, and to read what it saw."""
STEP = 0.01
"""Seconds of a generation step of a few sequences of the larger shape."""


def attention(scale: Scale, compiles: bool) -> float:
    """All cases for one backend."""
    return LIBRARY + compiles * COMPILE * VARIANTS * len(scale.heads) * len(scale.pages)


def generation(shape: Shape, batch: int, prompt: int) -> float:
    """Prompts, and then some hundred steps."""
    return SETTLE + context(shape, batch, prompt) + 100 * STEP


def context(shape: Shape, prompts: int, tokens: int) -> float:
    """Of so many tokens each."""
    return 2 * shape.matrices * prompts * tokens / PRODUCT


def throughput(work: Workload) -> float:
    """Two rounds."""
    return SETTLE + 2 * work.output_tokens * STEP
