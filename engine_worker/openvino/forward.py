"""Runs steps on the compiled decoder. Unlike a forward pass in torch, OpenVINO's does not hold the GIL."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
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
from engine_worker.openvino.arrays import MIN_ROWS, Pass, PreparedStep, build_pass, divided_rows, requested_rows
from engine_worker.openvino.cache import BlockCache
from engine_worker.openvino.graph import INPUTS
from engine_worker.openvino.passes import divide
from engine_worker.runner.forward import TakeRows, ignore_rows, rows_between, rows_per_block
from engine_worker.runner.methods import Rank
from engine_worker.step import NO_LIMIT, Move, Slice

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
        pass_tokens: int = NO_LIMIT,
    ) -> None:
        """`output_layers` must be those that the decoder was compiled with, and `adapters` must be None if it was
        compiled without `lora`. `exact`, `separates`: see `Runner`. `pass_tokens`: see `passes.divide`."""
        self.exact = exact
        self._pass_tokens = pass_tokens
        self.separates = separates
        self.cache = cache
        self.dtype = dtype
        self.window = widest_window(config.windows)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.hidden_dtype = torch.float32
        self.takes_embeds = True
        self.output_layers = output_layers
        self.rank = Rank(0, 1, self.device, compiled, cache)
        # smallest: for fewer sequences of one token the plugin uses other kernels, with other rounding: matrix products
        # of a single row, and attention that splits a sum over the threads. A padding sequence of more than one token
        # makes it use the same kernels for every step.
        self._pass = partial(
            build_pass,
            tokens_per_block=cache.tokens_per_block,
            window=self.window,
            smallest=max(MIN_ROWS, threads),
            spare=cache.spare,
            no_rows=np.zeros((0, config.hidden_size), np.float32),
            axes=config.rope.sections is not None,
            adapters=adapters is not None,
        )
        self._request = compiled.create_infer_request()
        self._head = compiled.head
        # Initial buffers of a shape that no input has.
        self._buffers: list[NDArray[Any]] = [np.zeros((0, 0))] * len(INPUTS)
        self._logits = np.zeros((MIN_ROWS, config.vocab_size), np.float32)
        """The previous pass' logits, in OpenVINO's memory."""
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
        rows = requested_rows(slices)
        if sum(len(part.tokens) for part in slices) <= self._pass_tokens:
            whole = self._pass(slices, rows)
            return PreparedStep([whole], whole.follows, bool(rows))
        divided = divide(slices, self._pass_tokens)
        shares, order = divided_rows(rows, divided)
        passes = list(map(self._pass, divided, shares))
        return PreparedStep(passes, any(one.follows for one in passes), bool(rows), order)

    def prepare(self, arrays: PreparedStep) -> PreparedStep:
        """Returns the step unchanged: there is nothing to copy to a device."""
        return arrays

    def load_adapters(self, plans: Sequence[LoadPlan], weights: Sequence[AdapterWeights] = ()) -> None:
        if self.adapters is not None:
            self.adapters.load(plans, weights)

    def missing_adapters(self, step: PreparedStep) -> Mapping[int, str]:
        if self.adapters is None:
            return {}
        with_adapters = [one.adapters.numbers for one in step.passes if one.adapters is not None]
        return self.adapters.missing(np.concatenate(with_adapters)) if with_adapters else {}

    def logits(self, moves: Iterable[Move], step: PreparedStep | None, take: TakeRows = ignore_rows) -> Tensor | None:
        """See `Forward.logits`."""
        self.check()
        self.cache.move(moves)
        if step is None:
            return None
        try:
            if len(step.passes) == 1:
                logits = torch.from_numpy(self._compute(step.passes[0]))
                hidden = self._hidden() if step.has_rows else []
            else:
                logits, hidden = self._compute_all(step)
            if step.has_rows:
                self._take_rows(hidden, take)
        except Exception:
            self._failed = True
            raise
        return logits if len(logits) else None

    def _compute(self, one: Pass) -> NDArray[np.float32]:
        """Returns the logits to sample from, in memory that the next pass overwrites."""
        self._set(one.inputs)
        if self._graph_adapters is not None:
            self._graph_adapters.use(self._adapters_of(one))
        self._logits = self._infer(len(one.inputs[ROWS]))
        return self._logits[: one.num_rows]

    def _compute_all(self, step: PreparedStep) -> tuple[Tensor, list[NDArray[np.float32]]]:
        """Logits of all passes, and their hidden states as in `_hidden`."""
        logits, hidden = [], []
        for one in step.passes:
            logits.append(self._compute(one).copy())
            if one.num_kept:
                hidden.append([rows.copy() for rows in self._hidden()])
        rows = [np.concatenate(parts)[step.kept] for parts in zip(*hidden, strict=True)]
        return torch.from_numpy(np.concatenate(logits)), rows

    def _hidden(self) -> list[NDArray[np.float32]]:
        """Hidden states [N, hidden] of the pass' kept tokens: the input of the head, then those after each of the
        output layers. In memory that the next pass overwrites."""
        return [self._request.get_output_tensor(1 + index).data for index in range(1 + len(self.output_layers))]

    def _adapters_of(self, one: Pass) -> StepAdapters | None:
        """None if the pass has no adapters, or all of them are missing."""
        if self.adapters is None or one.adapters is None:
            return None
        return self.adapters.step(*one.adapters)

    def _take_rows(self, rows: list[NDArray[np.float32]], take: TakeRows) -> None:
        """rows: as from `_hidden`."""
        hidden, *others = rows
        layers = dict(zip(self.output_layers, map(torch.from_numpy, others), strict=True))
        size = rows_per_block(self.vocab_size)
        for start in range(0, len(hidden), size):
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
        # A node that fails may only print its error and leave the previous pass' output in place.
        if len(logits) != num_rows or _first_bits(logits) == UNWRITTEN:
            raise RuntimeError("OpenVINO could not compute this step; its error message is above in the output")
        return logits

    def _set(self, inputs: list[NDArray[Any]]) -> None:
        """Copy each input into the buffer of the previous pass if the shapes are equal: faster than a new tensor."""
        for index, (array, buffer) in enumerate(zip(inputs, self._buffers, strict=True)):
            if buffer.shape == array.shape:
                buffer[...] = array
            else:
                # A copy, since a pass' arrays may share memory with other arrays, and later passes overwrite it.
                self._buffers[index] = copied = array.copy()
                self._request.set_input_tensor(index, ov.Tensor(copied, shared_memory=True))


def _first_bits(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """A view [1] of the first logit's bits."""
    return logits.view(np.int32)[0, :1]
