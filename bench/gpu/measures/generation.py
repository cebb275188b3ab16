"""Generation steps: tokens and bytes per second, and when the device waits for the host."""

from collections.abc import Mapping

import torch

from bench.gpu.core import GREEDY, Ask, Core, Window, calm, random_prompts
from bench.gpu.findings import Decode, Gaps
from bench.gpu.measures.idle import idle
from bench.gpu.served import Served
from sluice.ring.params import SamplingParams

AS_SERVED, EAGER, FREE = "as served", "eager", "temperature 1"
PEAKED, FLAT = "top-p 0.9, peaked", "top-p 0.9, flat"
"""Modes. What random weights say next is nearly flat: top-p lets half of the vocabulary pass, far more than the sampler
looks at before it looks again, which is the worst that there is. At a low temperature a few tokens pass, as they do
where a trained model is sure."""
SAMPLING: Mapping[str, SamplingParams] = {
    FREE: SamplingParams(),
    PEAKED: SamplingParams(temperature=0.05, top_p=0.9),
    FLAT: SamplingParams(top_p=0.9),
}
"""Of the modes that are not greedy."""
ROUNDS = 3
SPARE = 32
"""Steps beside those that are measured."""


def decode(served: Served, mode: str, batch: int, prompt: int, steps: int) -> Decode:
    """The fastest of three windows of so many steps, with all sequences generating."""
    core = _settled(served, mode, batch, prompt, ROUNDS * steps)
    window = min((core.advance(steps) for _ in range(ROUNDS)), key=lambda window: window.seconds)
    core.stop()
    step = window.seconds / window.steps
    read = served.weight_bytes + served.token_bytes * window.context / window.steps
    context = window.context // window.tokens
    name = served.shape.name
    return Decode(name, mode, batch, context, step, window.tokens / window.seconds, read / step)


def gaps(served: Served, mode: str, device: torch.device, batch: int, prompt: int, steps: int) -> Gaps:
    """A window for the time, and one for the profiler."""
    core = _settled(served, mode, batch, prompt, (ROUNDS + 2) * steps)
    window: Window = min((core.advance(steps) for _ in range(ROUNDS)), key=lambda window: window.seconds)
    found = idle(device, lambda: core.advance(steps))
    core.stop()
    step = window.seconds / window.steps
    return Gaps(served.shape.name, mode, batch, served.runner.overlap, step, found.total / steps, found.longest)


def _settled(served: Served, mode: str, batch: int, prompt: int, steps: int) -> Core:
    """A core whose sequences all generate, and can for so many steps and some more."""
    core = Core(served, SAMPLING.get(mode, GREEDY))
    reading = -(-batch * prompt // served.config.max_tokens_per_step) + batch // served.config.max_batch_size
    prompts = random_prompts(batch, prompt, served.shape.vocab_size, seed=batch)
    core.submit([Ask(tokens, reading + steps + SPARE) for tokens in prompts])
    core.settle()
    calm()
    return core
