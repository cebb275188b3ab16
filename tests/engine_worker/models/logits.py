"""Log-probabilities that a runner computes for prompts."""

import torch

from engine_worker.protocol import Runner
from engine_worker.step import Draw, Slice, Step
from sluice.wire.params import SamplingParams

EVERYTHING = SamplingParams(temperature=0.0, logprobs=97)


def logprobs_of(runner: Runner, prompts: list[list[int]]) -> list[torch.Tensor]:
    """For each prompt, the log-probabilities [97] of all tokens after it; computed in one step."""
    slices, block = [], 0
    for prompt in prompts:
        needed = -(-len(prompt) // runner.tokens_per_block)
        draw = Draw(EVERYTHING, 0, 0)
        slices.append(Slice(prompt, 0, range(block, block + needed), (draw,)))
        block += needed
    logprobs = []
    for drawn in runner.run(Step(tuple(slices))):
        top = dict(drawn.logprob.top)
        logprobs.append(torch.tensor([top[token] for token in range(97)]))
    return logprobs
