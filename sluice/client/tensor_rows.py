"""The rows of tensors that a stream has received over all its attempts."""

from collections.abc import Mapping
from dataclasses import replace

from sluice.client.errors import LostEvents
from sluice.client.results import Tensor
from sluice.v1 import generation_pb2 as pb


class ReceivedRows:
    """Counts the rows of each tensor, so that each row is returned once, in order."""

    def __init__(self, spec: pb.GenerationSpec) -> None:
        self._names = [tensor.name for tensor in spec.output.tensors]
        self._names += ["generation_logits"] * spec.output.generation_logits
        context = [tensor.name for tensor in spec.output.tensors if tensor.context]
        context += ["context_logits"] * spec.output.context_logits
        self._context = dict.fromkeys(context, spec.resume_context_rows)
        self._outputs = {output.index: dict.fromkeys(self._names, output.tensor_rows) for output in spec.resume}

    @property
    def context(self) -> int:
        """Number of rows received of all tensors of the prompt."""
        return min(self._context.values(), default=0)

    def output(self, index: int) -> int:
        """Number of rows received of all tensors of an output."""
        rows = self._outputs.get(index, {})
        return min((rows.get(name, 0) for name in self._names), default=0)

    def new(self, tensor: Tensor) -> Tensor | None:
        """The rows of a part that were not received before; None if all of them were.

        Raises LostEvents if rows before the part are missing.
        """
        received = self._context if tensor.context else self._outputs.setdefault(tensor.index, {})
        next_row, end = received.get(tensor.name, 0), tensor.start + tensor.shape[0]
        if end <= next_row:
            return None
        if tensor.start > next_row:
            raise LostEvents(f"tensor {tensor.name} lost rows: expected row {next_row} (got {tensor.start})")
        received[tensor.name] = end
        row_bytes, rows = len(tensor.data) // tensor.shape[0], end - next_row
        return replace(tensor, start=next_row, shape=(rows, *tensor.shape[1:]), data=tensor.data[-rows * row_bytes :])

    def check_complete(self, index: int, prompt_tokens: int, tokens: int) -> None:
        """Raises LostEvents unless the rows of the prompt, and of the output's `tokens`, were received."""
        _check(self._context, list(self._context), prompt_tokens)
        _check(self._outputs.get(index, {}), self._names, tokens)


def _check(known: Mapping[str, int], names: list[str], rows: int) -> None:
    for name in names:
        if known.get(name, 0) < rows:
            raise LostEvents(f"tensor {name} lost rows: got {known.get(name, 0)} of {rows}")
