"""Penalties on the tokens that a sequence already contains."""

from engine_worker.sampling.rules import Edits, Penalized
from engine_worker.sampling.seen import PromptTokens, SeenTokens
from sluice.wire.params import SamplingParams


class Penalties:
    """The repetition penalty for tokens of prompt and output (CTRL, arXiv:1909.05858), which does not grow with the
    number of occurrences; presence + count * frequency for tokens of the output, as in OpenAI's API."""

    def __init__(self, sampling: SamplingParams, prompt: PromptTokens) -> None:
        self._repetition = sampling.repetition_penalty
        self._counting = bool(sampling.presence_penalty or sampling.frequency_penalty)
        # Without a repetition penalty, tokens of the prompt are not penalized.
        seen = PromptTokens(()) if self._repetition == 1.0 else prompt
        self._seen = SeenTokens(seen, sampling.presence_penalty, sampling.frequency_penalty)

    def feed(self, tokens: list[int]) -> None:
        self._seen.add(tokens[-1])

    def undo(self, tokens: list[int]) -> None:
        self._seen.remove(tokens[-1])

    def edit(self, _tokens: list[int], edits: Edits) -> None:
        ids = self._seen.ids
        if len(ids):
            amounts = self._seen.amounts.copy() if self._counting else None
            edits.penalized = Penalized(ids.copy(), self._repetition, amounts)
