"""Runs steps on the compiled decoder. Unlike a forward pass in torch, OpenVINO's does not hold the GIL."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.layers.adapters import StepAdapters
from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.device import DeviceAdapters, LoadPlan
from engine_worker.models.config import DecoderConfig, widest_window
from engine_worker.openvino.adapters import GraphAdapters
from engine_worker.openvino.arrays import MIN_ROWS, PreparedStep, StepNumbers, prepared_step
from engine_worker.openvino.cache import BlockCache
from engine_worker.openvino.graph import INPUTS
from engine_worker.runner.forward import TakeRows, ignore_rows, rows_between, rows_per_block
from engine_worker.runner.methods import Rank
from engine_worker.step import Move, Slice

ROWS = next(index for index, (name, *_) in enumerate(INPUTS) if name == "rows")
UNWRITTEN = 0x7FC0DEAD
"""Bits of a float32 NaN that no arithmetic produces: marks logits that the plugin has not written."""


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
        adapters: DeviceAdapters | None = None,
        *,
        exact: bool = False,
        separates: bool = False,
    ) -> None:
        """`output_layers` must be those that the decoder was compiled with, and `adapters` must be None if it was
        compiled without `lora`. `exact`, `separates`: see `Runner`."""
        self.exact = exact
        self.separates = separates
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
        # For fewer sequences of one token the plugin uses other kernels, with other rounding: matrix products of a
        # single row, and attention that splits a sum over the threads. A padding sequence of more than one token makes
        # it use the same kernels for every step.
        self._smallest = max(MIN_ROWS, threads)
        self._no_rows = np.zeros((0, config.hidden_size), np.float32)
        self._request = compiled.create_infer_request()
        self._head = compiled.head
        # Initial buffers of a shape that no input has.
        self._buffers: list[NDArray[Any]] = [np.zeros((0, 0))] * len(INPUTS)
        self._logits = np.zeros((MIN_ROWS, config.vocab_size), np.float32)
        """The previous step's logits, in OpenVINO's memory."""
        self._failed = False
        for index, tensor in enumerate(cache.tensors, len(INPUTS)):
            self._request.set_input_tensor(index, tensor)
        self.adapters = adapters
        self._graph_adapters: GraphAdapters | None = compiled.adapters
        if self._graph_adapters is not None:
            flag = ov.Tensor(self._graph_adapters.flag, shared_memory=True)
            self._request.set_input_tensor(len(INPUTS) + len(cache.tensors), flag)

    def take_saved(self) -> None:
        """The file has the blocks themselves: nothing is saved."""

    def check(self) -> None:
        if self._failed:
            # When a node throws, its other threads may still be running it: a later call could crash the process.
            raise RuntimeError("OpenVINO is in an undefined state after an error")

    def close(self) -> None:
        """Nothing to wait for: `logits` returns when the step is complete."""

    def arrays(self, slices: Sequence[Slice]) -> PreparedStep:
        size, spare = self.cache.tokens_per_block, self.cache.spare
        step = prepared_step(slices, size, self.window, self._smallest, spare, self._no_rows, axes=self._axes)
        if self.adapters is not None:
            step.adapters = StepNumbers.of(slices)
        return step

    def prepare(self, arrays: PreparedStep) -> PreparedStep:
        """Returns the step unchanged: there is nothing to copy to a device."""
        return arrays

    def load_adapters(self, plans: Sequence[LoadPlan], weights: Sequence[AdapterWeights] = ()) -> None:
        if self.adapters is not None:
            self.adapters.load(plans, weights)

    def missing_adapters(self, step: PreparedStep) -> Mapping[int, str]:
        if self.adapters is None or step.adapters is None:
            return {}
        return self.adapters.missing(step.adapters.numbers)

    def logits(self, moves: Iterable[Move], step: PreparedStep | None, take: TakeRows = ignore_rows) -> Tensor | None:
        """See `Forward.logits`."""
        self.check()
        self.cache.move(moves)
        if step is None:
            return None
        self._set(step.inputs)
        if self._graph_adapters is not None:
            self._graph_adapters.use(self._adapters_of(step))
        try:
            self._logits = self._infer(len(step.inputs[ROWS]))
            if step.num_kept:
                self._take_rows(step.num_kept, take)
        except Exception:
            self._failed = True
            raise
        return torch.from_numpy(self._logits[: step.num_rows]) if step.num_rows else None

    def _adapters_of(self, step: PreparedStep) -> StepAdapters | None:
        """None if the step has no adapters, or all of them are missing."""
        if self.adapters is None or step.adapters is None:
            return None
        return self.adapters.step(*step.adapters)

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
        """Returns logits [num_rows, vocab], in OpenVINO's memory. Raises RuntimeError."""
        _first_bits(self._logits)[:] = UNWRITTEN
        self._request.infer(share_outputs=True)
        if self._graph_adapters is not None:
            self._graph_adapters.check()
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data
        # A node that fails may only print its error and leave the previous step's output in place.
        if len(logits) != num_rows or _first_bits(logits) == UNWRITTEN:
            raise RuntimeError("OpenVINO could not compute this step; its error message is above in the output")
        return logits

    def _set(self, inputs: list[NDArray[Any]]) -> None:
        """Copy each input into the buffer of the previous step if the shapes are equal: faster than a new tensor."""
        for index, (array, buffer) in enumerate(zip(inputs, self._buffers, strict=True)):
            if buffer.shape == array.shape:
                buffer[...] = array
            else:
                # A copy, since a step's arrays may share memory with other arrays, and later steps overwrite it.
                self._buffers[index] = copied = array.copy()
                self._request.set_input_tensor(index, ov.Tensor(copied, shared_memory=True))


def _first_bits(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """A view [1] of the first logit's bits."""
    return logits.view(np.int32)[0, :1]
