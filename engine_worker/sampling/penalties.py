"""Penalties on the tokens that a sequence has already."""

import numpy as np

from engine_worker.sampling.rules import Edits, Penalized
from engine_worker.sampling.seen import PromptTokens, SeenTokens
from sluice.ring.params import SamplingParams


class Penalties:
    """Repetition over prompt and output (CTRL, arXiv:1909.05858), which does not grow with the number of occurrences;
    presence + count * frequency over the output (as in OpenAI's API)."""

    def __init__(self, sampling: SamplingParams, prompt: PromptTokens) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        # Without a repetition penalty nothing happens to the prompt's tokens.
        self._seen = SeenTokens(PromptTokens(()) if self._repetition == 1.0 else prompt)

    def feed(self, tokens: list[int]) -> None:
        self._seen.add(tokens[-1])

    def undo(self, tokens: list[int]) -> None:
        self._seen.remove(tokens[-1])

    def edit(self, _tokens: list[int], edits: Edits) -> None:
        counts = self._seen.counts
        amounts = (self._presence * (counts > 0) + self._frequency * counts).astype(np.float32)
        edits.penalized = Penalized(self._seen.ids.copy(), self._repetition, amounts)
