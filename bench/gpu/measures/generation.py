"""Generation steps: tokens and bytes per second, and when the device waits for the host."""

import torch

from bench.gpu.core import Ask, Core, Window, calm, random_prompts
from bench.gpu.findings import Decode, Gaps
from bench.gpu.measures.idle import idle
from bench.gpu.served import Served

AS_SERVED, EAGER = "as served", "eager"
"""Modes."""
ROUNDS = 3
SPARE = 32
"""Steps beside those that are measured."""


def decode(served: Served, mode: str, batch: int, prompt: int, steps: int) -> Decode:
    """The fastest of three windows of so many steps, with all sequences generating."""
    core = _settled(served, batch, prompt, ROUNDS * steps)
    window = min((core.advance(steps) for _ in range(ROUNDS)), key=lambda window: window.seconds)
    core.stop()
    step = window.seconds / window.steps
    read = served.weight_bytes + served.token_bytes * window.context / window.steps
    context = window.context // window.tokens
    name = served.shape.name
    return Decode(name, mode, batch, context, step, window.tokens / window.seconds, read / step)


def gaps(served: Served, device: torch.device, batch: int, prompt: int, steps: int) -> Gaps:
    """A window for the time, and one for the profiler."""
    core = _settled(served, batch, prompt, (ROUNDS + 2) * steps)
    window: Window = min((core.advance(steps) for _ in range(ROUNDS)), key=lambda window: window.seconds)
    found = idle(device, lambda: core.advance(steps))
    core.stop()
    step = window.seconds / window.steps
    return Gaps(served.shape.name, batch, served.runner.overlap, step, found.total / steps, found.longest)


def _settled(served: Served, batch: int, prompt: int, steps: int) -> Core:
    """A core whose sequences all generate, and can for so many steps and some more."""
    core = Core(served)
    reading = -(-batch * prompt // served.config.max_tokens_per_step) + batch // served.config.max_batch_size
    prompts = random_prompts(batch, prompt, served.shape.vocab_size, seed=batch)
    core.submit([Ask(tokens, reading + steps + SPARE) for tokens in prompts])
    core.settle()
    calm()
    return core
