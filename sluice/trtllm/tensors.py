"""Tensors of an output, in the shapes of TensorRT-LLM's results."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sluice.client import Chunk, Tensor
from sluice.executor import CompletionOutput
from sluice.executor.response import CONTEXT_LOGITS, GENERATION_LOGITS
from sluice.trtllm.result import AdditionalOutput, Result
from sluice.trtllm.sampling import OutputConfig

if TYPE_CHECKING:
    import torch

ALL = 1 << 62


class WantedTensors:
    def __init__(self, config: OutputConfig, num_prompt: int) -> None:
        others = config.additional_model_outputs or []
        self._context_logits = config.return_context_logits
        self._generation_logits = config.return_generation_logits
        self._others = [each.name for each in others]
        self._context_others = [each.name for each in others if each.gather_context]
        self._num_prompt = num_prompt

    def num_tokens(self, outputs: Sequence[CompletionOutput], index: int, unread: Iterable[Chunk] = ()) -> int:
        """How many tokens of this output have come with all of their rows, and after those of the prompt."""
        names = [*self._others, *[GENERATION_LOGITS] * self._generation_logits]
        context = [*self._context_others, *[CONTEXT_LOGITS] * self._context_logits]
        if not (names or context):
            return ALL
        new = [chunk.tensor for chunk in unread if chunk.tensor is not None]
        first, own = ([*outputs[i].tensors, *(each for each in new if each.index == i)] for i in (0, index))
        if any(_rows(first, name, context=True) < self._num_prompt for name in context):
            return 0
        return min((_rows(own, name) for name in names), default=ALL)

    def fill(
        self, result: Result, outputs: Sequence[CompletionOutput], start: int, end: int, *, streaming: bool
    ) -> None:
        """`result` is of the tokens start to end - 1 of its output."""
        first, own = outputs[0].tensors, outputs[result.sequence_index].tensors
        if self._context_logits:
            result.context_logits = _between(first, CONTEXT_LOGITS, 0, ALL, context=True)
        if self._generation_logits:
            logits = _between(own, GENERATION_LOGITS, start, end)
            # [tokens, beams, vocabulary] in a stream, else [beams, tokens, vocabulary]; a beam is an output here.
            result.generation_logits = logits[:, None] if streaming else logits[None]
        for name in self._context_others:
            found = _between(first, name, 0, ALL, context=True)
            result.additional_outputs.append(AdditionalOutput(f"context_{name}", found))
        for name in self._others:
            result.additional_outputs.append(AdditionalOutput(name, _between(own, name, start, end)[None]))


def _rows(tensors: Iterable[Tensor], name: str, *, context: bool = False) -> int:
    return sum(each.shape[0] for each in tensors if (each.name, each.context) == (name, context))


def _between(tensors: Iterable[Tensor], name: str, start: int, end: int, *, context: bool = False) -> "torch.Tensor":
    """Rows start to end - 1 of one tensor, as far as they have come."""
    import numpy as np
    import torch

    found = []
    for each in tensors:
        if (each.name, each.context) == (name, context) and each.start < end and each.start + each.shape[0] > start:
            found.append(each.array()[max(0, start - each.start) : end - each.start])
    # A copy, which may be written.
    return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0)
