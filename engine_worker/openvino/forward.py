"""A step's arrays through the compiled decoder. Other than torch's, it computes without the interpreter's lock."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.models.config import DecoderConfig, widest_window
from engine_worker.openvino.cache import BlockCache
from engine_worker.openvino.graph import INPUTS
from engine_worker.runner.batch import StepArrays
from engine_worker.runner.methods import Rank
from engine_worker.step import Move

PADDING = 2
"""Tokens of the sequence that pads small batches."""
UNWRITTEN = 0x7FC0DEAD
"""As a float not a number, and none that arithmetic makes."""
LEAST = 2
"""Rows of a matrix product; a single one would get another kernel, and other bits."""


class PreparedStep:
    """A step as the graph's inputs."""

    def __init__(self, arrays: StepArrays, inputs: list[NDArray[Any]], num_rows: int) -> None:
        self.follows = len(arrays.follow_tokens) > 0
        self.inputs = inputs
        """In the order of `graph.INPUTS`."""
        self.num_rows = num_rows
        self._arrays = arrays

    def follow(self, sampled: Tensor) -> None:
        """Fill in the tokens that the previous step drew: `sampled` [D] int64."""
        self.inputs[0][self._arrays.follow_tokens] = sampled.numpy()[self._arrays.follow_draws]


class OpenVinoForward:
    """See `engine_worker.runner.forward.Forward`."""

    attention = "openvino"
    device = torch.device("cpu")

    def __init__(
        self, compiled: ov.CompiledModel, config: DecoderConfig, cache: BlockCache, dtype: str, threads: int
    ) -> None:
        self.cache = cache
        self.dtype = dtype
        self.window = widest_window(config.windows)
        self.vocab_size = config.vocab_size
        self.rank = Rank(0, 1, self.device, compiled, cache)
        # Smaller generation steps get other kernels: products of one row, attention that splits a sum over the threads.
        # With a sequence of more than one token beside them, every step is computed alike.
        self._smallest = max(LEAST, threads)
        self._request = compiled.create_infer_request()
        # No step has inputs of this shape.
        self._buffers: list[NDArray[Any]] = [np.zeros((0, 0))] * len(INPUTS)
        self._latest = np.zeros((LEAST, config.vocab_size), np.float32)
        """The logits of the step before, in OpenVINO's memory."""
        self._usable = True
        """False during a step, and after one that failed."""
        for index, tensor in enumerate(cache.tensors, len(INPUTS)):
            self._request.set_input_tensor(index, tensor)

    def check(self) -> None:
        if not self._usable:
            # A node that throws leaves its threads in the middle of their work: a later call may crash the process.
            raise RuntimeError("OpenVINO is in an undefined state after an error")

    def close(self) -> None:
        """Nothing is left on the device."""

    def prepare(self, arrays: StepArrays) -> PreparedStep:
        """Everything that can be done before the previous step has finished."""
        lengths, starts = arrays.context_lengths, arrays.query_start
        num_tokens, size, rows = len(arrays.token_ids), self.cache.tokens_per_block, arrays.last_tokens
        used = (lengths + (size - 1)) // size
        blocks = arrays.block_tables
        inside = np.arange(blocks.shape[1]) < used[:, None]
        inputs = [
            arrays.token_ids.astype(np.int32),
            arrays.positions.astype(np.float32),
            lengths - (starts[1:] - starts[:-1]),
            starts,
            blocks[inside],
            np.concatenate((_ZERO, np.cumsum(used, dtype=np.int32))),
            np.array(max(arrays.max_context, PADDING), np.int32),
            np.arange(num_tokens, dtype=np.int32) if rows is None else rows.astype(np.int32),
        ]
        num_rows = len(inputs[-1])
        if num_rows < LEAST:
            inputs[-1] = np.concatenate((inputs[-1], np.zeros(LEAST - num_rows, np.int32)))
        if arrays.generation_rows == num_tokens and num_tokens < self._smallest:
            _pad(inputs, self.cache.spare)
        return PreparedStep(arrays, inputs, num_rows)

    def logits(self, moves: Iterable[Move], step: PreparedStep | None) -> Tensor | None:
        """See `Forward.logits`."""
        self.cache.move(moves)
        if step is None:
            return None
        request = self._request
        self._set(step.inputs)
        _marker(self._latest)[:] = UNWRITTEN
        self._usable = False
        request.infer(share_outputs=True)
        found = request.get_output_tensor(0).data
        # A node that fails may only print its error, and leave what was there before.
        if len(found) != len(step.inputs[-1]) or _marker(found) == UNWRITTEN:
            raise RuntimeError("OpenVINO could not compute this step; its output, before this error, says why")
        self._latest, self._usable = found, True
        return torch.from_numpy(found[: step.num_rows]) if step.num_rows else None

    def _set(self, inputs: list[NDArray[Any]]) -> None:
        """Copied where the shape is that of the step before, which is faster than a new tensor."""
        for index, (array, buffer) in enumerate(zip(inputs, self._buffers, strict=True)):
            if buffer.shape == array.shape:
                buffer[...] = array
            else:
                # Of its own: a step's arrays may share memory with others.
                self._buffers[index] = own = array.copy()
                self._request.set_input_tensor(index, ov.Tensor(own, shared_memory=True))


_ZERO = np.zeros(1, np.int32)
_NO_IDS, _NO_POSITIONS = np.zeros(PADDING, np.int32), np.zeros(PADDING, np.float32)


def _marker(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """The first of them, as an integer."""
    return logits.view(np.int32)[0, :1]


def _pad(inputs: list[NDArray[Any]], block: int) -> None:
    """Append a new sequence of PADDING tokens in a block of its own, whose logits nobody reads."""
    starts, blocks_start = inputs[3], inputs[5]
    tails: list[NDArray[Any]] = [_NO_IDS, _NO_POSITIONS, _ZERO, starts[-1:] + PADDING]
    tails += [np.array([block]), blocks_start[-1:] + 1]
    for index, tail in enumerate(tails):
        inputs[index] = np.concatenate((inputs[index], tail), dtype=inputs[index].dtype)
