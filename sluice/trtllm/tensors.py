"""The tensors of an output, in the shapes of TensorRT-LLM's results."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.client import Chunk, Tensor
from sluice.executor import CompletionOutput
from sluice.executor.response import CONTEXT_LOGITS, GENERATION_LOGITS
from sluice.trtllm.request import OutputConfig
from sluice.trtllm.result import AdditionalOutput, Result

if TYPE_CHECKING:
    import torch

ALL = 1 << 62
"""A number of rows that no output reaches."""


class RowWidths(NamedTuple):
    """Number of values in a row of a model's tensors, for the shapes of tensors without rows."""

    logits: int
    hidden: int

    @staticmethod
    def of(model: Mapping[str, Any]) -> "RowWidths":
        """`model` is the model's config.json."""
        return RowWidths(int(model["vocab_size"]), int(model.get("hidden_size") or model.get("n_embd") or 0))

    def width(self, name: str) -> int:
        return self.logits if name in (CONTEXT_LOGITS, GENERATION_LOGITS) else self.hidden


class WantedTensors:
    """The tensors that one request returns."""

    def __init__(self, config: OutputConfig, num_prompt: int, widths: RowWidths) -> None:
        """`num_prompt`: number of prompt tokens."""
        others = config.additional_model_outputs or []
        self._context_logits = config.return_context_logits
        self._generation_logits = config.return_generation_logits
        self._others = [each.name for each in others]
        self._context_others = [each.name for each in others if each.gather_context]
        self._num_prompt = num_prompt
        self._widths = widths

    def num_tokens(self, outputs: Sequence[CompletionOutput], index: int, unread: Iterable[Chunk] = ()) -> int:
        """Number of tokens of an output whose tensor rows, and those of the prompt, have all been received."""
        names = [*self._others, *[GENERATION_LOGITS] * self._generation_logits]
        context = [*self._context_others, *[CONTEXT_LOGITS] * self._context_logits]
        if not (names or context):
            return ALL
        new = [chunk.tensor for chunk in unread if chunk.tensor is not None]
        first, this = ([*outputs[i].tensors, *(tensor for tensor in new if tensor.index == i)] for i in (0, index))
        if any(_rows(first, name, context=True) < self._num_prompt for name in context):
            return 0
        return min((_rows(this, name) for name in names), default=ALL)

    def fill(
        self, result: Result, outputs: Sequence[CompletionOutput], start: int, end: int, *, streaming: bool
    ) -> None:
        """Set the tensors of `result`, which has the tokens [start, end) of its output."""
        first, this = outputs[0].tensors, outputs[result.sequence_index].tensors
        if self._context_logits:
            result.context_logits = self._between(first, CONTEXT_LOGITS, 0, ALL, context=True)
        if self._generation_logits:
            logits = self._between(this, GENERATION_LOGITS, start, end)
            # [tokens, beams, vocabulary] in a stream, else [beams, tokens, vocabulary]. Each beam is a separate output.
            result.generation_logits = logits[:, None] if streaming else logits[None]
        for name in self._context_others:
            rows = self._between(first, name, 0, ALL, context=True)
            result.additional_outputs.append(AdditionalOutput(f"context_{name}", rows))
        for name in self._others:
            result.additional_outputs.append(AdditionalOutput(name, self._between(this, name, start, end)[None]))

    def _between(
        self, tensors: Iterable[Tensor], name: str, start: int, end: int, *, context: bool = False
    ) -> "torch.Tensor":
        """The received rows [start, end) of one tensor: [rows, width], also without rows."""
        import numpy as np
        import torch

        parts = []
        for part in tensors:
            if (part.name, part.context) == (name, context) and part.start < end and part.start + part.shape[0] > start:
                parts.append(part.array()[max(0, start - part.start) : end - part.start])
        if not parts:
            return torch.empty(0, self._widths.width(name))
        # A copy, which the caller may modify.
        return torch.from_numpy(np.concatenate(parts))


def _rows(tensors: Iterable[Tensor], name: str, *, context: bool = False) -> int:
    return sum(tensor.shape[0] for tensor in tensors if (tensor.name, tensor.context) == (name, context))
