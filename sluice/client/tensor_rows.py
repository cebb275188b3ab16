"""Which rows of its tensors a stream has received over all its attempts."""

from collections.abc import Mapping
from dataclasses import replace

from sluice.client.errors import LostEvents
from sluice.client.results import Tensor
from sluice.v1 import generation_pb2 as pb


class ReceivedRows:
    """Row i of every tensor comes once, after row i - 1."""

    def __init__(self, spec: pb.GenerationSpec) -> None:
        self._names = [each.name for each in spec.output.tensors]
        self._names += ["generation_logits"] * spec.output.generation_logits
        context = [each.name for each in spec.output.tensors if each.context]
        context += ["context_logits"] * spec.output.context_logits
        self._context = dict.fromkeys(context, spec.resume_context_rows)
        self._outputs = {each.index: dict.fromkeys(self._names, each.tensor_rows) for each in spec.resume}

    @property
    def context(self) -> int:
        """Rows of every tensor of the prompt."""
        return min(self._context.values(), default=0)

    def output(self, index: int) -> int:
        """Rows of every tensor of an output."""
        rows = self._outputs.get(index, {})
        return min((rows.get(name, 0) for name in self._names), default=0)

    def new(self, tensor: Tensor) -> Tensor | None:
        """Its rows that have not come before; None: all have. Raises LostEvents if some are missing before it."""
        known = self._context if tensor.context else self._outputs.setdefault(tensor.index, {})
        have, end = known.get(tensor.name, 0), tensor.start + tensor.shape[0]
        if end <= have:
            return None
        if tensor.start > have:
            raise LostEvents(f"tensor {tensor.name} lost rows: expected row {have}, got {tensor.start}")
        known[tensor.name] = end
        size, rows = len(tensor.data) // tensor.shape[0], end - have
        return replace(tensor, start=have, shape=(rows, *tensor.shape[1:]), data=tensor.data[-rows * size :])

    def check_complete(self, index: int, prompt_tokens: int, tokens: int) -> None:
        """Raises LostEvents unless the prompt's rows, and those of an output's `tokens`, have come."""
        _check(self._context, list(self._context), prompt_tokens)
        _check(self._outputs.get(index, {}), self._names, tokens)


def _check(known: Mapping[str, int], names: list[str], rows: int) -> None:
    for name in names:
        if known.get(name, 0) < rows:
            raise LostEvents(f"tensor {name} lost rows: got {known.get(name, 0)} of {rows}")
