"""Prompts: tokens and operations per second."""

import time

from bench.gpu.core import Ask, Core, calm, random_prompts
from bench.gpu.findings import Context
from bench.gpu.served import Served


def context(served: Served, count: int, tokens: int) -> Context:
    """So many prompts at once, one token after each; the second of two rounds."""
    seconds = 0.0
    for seed in (1, 2):
        core = Core(served)
        asks = [Ask(prompt, 1) for prompt in random_prompts(count, tokens, served.shape.vocab_size, seed)]
        calm()
        began = time.perf_counter()
        core.submit(asks)
        core.finish()
        seconds = time.perf_counter() - began
    flops = count * (2 * served.shape.matrices * tokens + 2 * served.shape.head_sizes * tokens**2)
    return Context(served.shape.name, count, tokens, count * tokens / seconds, flops / seconds)
