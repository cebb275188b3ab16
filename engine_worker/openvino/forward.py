"""A step's arrays through the compiled decoder. Other than torch's, it computes without the interpreter's lock."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.device import LoadPlan
from engine_worker.models.config import DecoderConfig, widest_window
from engine_worker.openvino.arrays import LEAST, PreparedStep, prepared_step
from engine_worker.openvino.cache import BlockCache
from engine_worker.openvino.graph import INPUTS
from engine_worker.runner.forward import TakeRows, ignore_rows, rows_between, rows_per_block
from engine_worker.runner.methods import Rank
from engine_worker.step import Move, Slice

ROWS = next(index for index, (name, *_) in enumerate(INPUTS) if name == "rows")
UNWRITTEN = 0x7FC0DEAD
"""As a float not a number, and none that arithmetic makes."""


class OpenVinoForward:
    """See `engine_worker.runner.forward.Forward`."""

    attention = "openvino"
    device = torch.device("cpu")

    def __init__(
        self,
        compiled: ov.CompiledModel,
        config: DecoderConfig,
        cache: BlockCache,
        dtype: str,
        threads: int,
        output_layers: tuple[int, ...] = (),
    ) -> None:
        """`output_layers`: those that it was compiled with."""
        self.cache = cache
        self.dtype = dtype
        self.window = widest_window(config.windows)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.hidden_dtype = torch.float32
        self.takes_embeds = True
        self._axes = config.rope.sections is not None
        self.output_layers = output_layers
        self.rank = Rank(0, 1, self.device, compiled, cache)
        # Smaller generation steps get other kernels: products of one row, attention that splits a sum over the threads.
        # With a sequence of more than one token beside them, every step is computed alike.
        self._smallest = max(LEAST, threads)
        self._no_rows = np.zeros((0, config.hidden_size), np.float32)
        self._request = compiled.create_infer_request()
        self._head = compiled.head
        # No step has inputs of this shape.
        self._buffers: list[NDArray[Any]] = [np.zeros((0, 0))] * len(INPUTS)
        self._latest = np.zeros((LEAST, config.vocab_size), np.float32)
        """The logits of the step before, in OpenVINO's memory."""
        self._failed = False
        for index, tensor in enumerate(cache.tensors, len(INPUTS)):
            self._request.set_input_tensor(index, tensor)

    def check(self) -> None:
        if self._failed:
            # A node that throws leaves its threads in the middle of their work: a later call may crash the process.
            raise RuntimeError("OpenVINO is in an undefined state after an error")

    def close(self) -> None:
        """Nothing is left on the device."""

    def arrays(self, slices: Sequence[Slice]) -> PreparedStep:
        size, spare = self.cache.tokens_per_block, self.cache.spare
        return prepared_step(slices, size, self.window, self._smallest, spare, self._no_rows, axes=self._axes)

    def prepare(self, arrays: PreparedStep) -> PreparedStep:
        """Nothing has to go to a device."""
        return arrays

    def load_adapters(self, plans: Sequence[LoadPlan], weights: Sequence[AdapterWeights] = ()) -> None:
        raise NotImplementedError("OpenVINO's graphs have no adapters")

    def missing_adapters(self, step: PreparedStep) -> Mapping[int, str]:  # noqa: ARG002
        return {}

    def logits(self, moves: Iterable[Move], step: PreparedStep | None, take: TakeRows = ignore_rows) -> Tensor | None:
        """See `Forward.logits`."""
        self.check()
        self.cache.move(moves)
        if step is None:
            return None
        self._set(step.inputs)
        try:
            self._latest = self._infer(len(step.inputs[ROWS]))
            if step.num_kept:
                self._take_rows(step.num_kept, take)
        except Exception:
            self._failed = True
            raise
        return torch.from_numpy(self._latest[: step.num_rows]) if step.num_rows else None

    def _take_rows(self, num_kept: int, take: TakeRows) -> None:
        hidden = self._request.get_output_tensor(1).data
        layers = {
            layer: torch.from_numpy(self._request.get_output_tensor(2 + i).data)
            for i, layer in enumerate(self.output_layers)
        }
        size = rows_per_block(self.vocab_size)
        for start in range(0, num_kept, size):
            end = start + size
            normed, logits = map(torch.from_numpy, self._head(hidden[start:end]))
            take(normed, logits, rows_between(layers, start, end))

    def _infer(self, num_rows: int) -> NDArray[np.float32]:
        """The logits, in OpenVINO's memory. Raises RuntimeError."""
        _marker(self._latest)[:] = UNWRITTEN
        self._request.infer(share_outputs=True)
        found: NDArray[np.float32] = self._request.get_output_tensor(0).data
        # A node that fails may only print its error, and leave what was there before.
        if len(found) != num_rows or _marker(found) == UNWRITTEN:
            raise RuntimeError("OpenVINO could not compute this step; its output, before this error, says why")
        return found

    def _set(self, inputs: list[NDArray[Any]]) -> None:
        """Copied where the shape is that of the step before, which is faster than a new tensor."""
        for index, (array, buffer) in enumerate(zip(inputs, self._buffers, strict=True)):
            if buffer.shape == array.shape:
                buffer[...] = array
            else:
                # Of its own: a step's arrays may share memory with others.
                self._buffers[index] = own = array.copy()
                self._request.set_input_tensor(index, ov.Tensor(own, shared_memory=True))


def _marker(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """The first of them, as an integer."""
    return logits.view(np.int32)[0, :1]
