"""The forward pass with torch: computes a step's arrays with the model, in the same way on every rank."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.backend import AttentionBackend, AttentionInputs, synchronize
from engine_worker.attention.cache import KVCache
from engine_worker.attention.saver import Saved
from engine_worker.formats.rounding import NAMES
from engine_worker.layers.adapters import StepAdapters
from engine_worker.layers.shard import UNSHARDED, Shard
from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.device import DeviceAdapters, LoadPlan
from engine_worker.models.config import widest_window
from engine_worker.models.model import Embeds, Model, Taps
from engine_worker.runner.batch import StepArrays, StepTensors, arrays_to_device, build_arrays
from engine_worker.runner.forward import NO_LAYERS, TakeRows, ignore_rows, rows_between, rows_per_block
from engine_worker.runner.graphs import Graphs
from engine_worker.runner.methods import Rank
from engine_worker.step import Move, Slice


class StepOnDevice(NamedTuple):
    """See `PreparedStep`."""

    tensors: StepTensors
    """Padded if a graph computes it."""
    inputs: AttentionInputs
    """Prepared by the backend, unless a graph computes the step."""
    num_tokens: int
    """Without padding."""
    follows: bool
    arrays: StepArrays | None = None
    """Only in a step with adapters: these are looked up after the step's adapters were loaded."""
    keeps_layers: bool = False
    graphs: Graphs | None = None
    """Graphs of which one computes the step; None: the step is computed without graphs."""

    @property
    def has_rows(self) -> bool:
        return self.tensors.kept_tokens is not None

    def follow(self, sampled: Tensor) -> None:
        self.tensors.follow(sampled)


class TorchForward:
    """A model, or a rank's shard of it, with its KV cache, attention backend and CUDA graphs, if any; see `Forward`."""

    # Libraries choose the kernel of a matrix product by the number of tokens in the step.
    exact = False
    separates = False

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: AttentionBackend,
        device: torch.device,
        graphs: Sequence[Graphs] = (),
        shard: Shard = UNSHARDED,
        adapters: DeviceAdapters | None = None,
        output_layers: tuple[int, ...] = (),
        quantize: str = "none",
    ) -> None:
        """`quantize`: the setting by which weights are rounded beyond the checkpoint's."""
        self.model = model
        self._axes = model.has_axes
        self.cache = cache
        self.backend = backend
        self.device = device
        self._graphs = graphs
        self.shard = shard
        self.adapters = adapters
        self.attention = backend.name
        computed = str(cache.dtype).removeprefix("torch.")
        self.dtype = computed if quantize == "none" else f"{computed}, weights {NAMES[quantize]}"
        self.window = widest_window(model.config.windows)
        self.vocab_size = model.config.vocab_size
        self.hidden_size = model.config.hidden_size
        self.hidden_dtype = cache.dtype
        self.takes_embeds = model.takes_embeds
        self.output_layers = output_layers
        self.rank = Rank(shard.rank, shard.size, device, model, cache)

    def check(self) -> None:
        # After an illegal access, a failed assertion or a memory fault, every CUDA call of this process fails.
        synchronize(self.device)

    def close(self) -> None:
        """Wait for the device and drop the graphs. No step can be computed afterwards."""
        synchronize(self.device)
        # NCCL cannot shut down while a graph that captured one of its operations exists.
        self._graphs = ()

    def arrays(self, slices: Sequence[Slice]) -> StepArrays:
        return build_arrays(slices, self.cache.tokens_per_block, self.window, axes=self._axes)

    def prepare(self, arrays: StepArrays) -> StepOnDevice:
        count, follows = len(arrays.token_ids), len(arrays.follow_tokens) > 0
        # Graphs do not save layers for clients, which would slow down all other steps.
        for graphs in () if arrays.keeps_layers else self._graphs:
            if (size := graphs.fit(arrays)) is not None:
                tensors = StepTensors.of(graphs.pad(arrays, size), self.device)
                return StepOnDevice(tensors, tensors.attention, count, follows, graphs=graphs)
        tensors = StepTensors.of(arrays, self.device)
        if arrays.virtual_tokens is not None:
            tensors = replace(tensors, embeds=self._embeds(arrays.virtual_tokens, arrays.virtual_rows))
        inputs = self.backend.prepare(tensors.attention, self.cache)
        with_adapters = None if arrays.adapters is None else arrays
        return StepOnDevice(tensors, inputs, count, follows, with_adapters, arrays.keeps_layers)

    def load_adapters(self, plans: Sequence[LoadPlan], weights: Sequence[AdapterWeights] = ()) -> None:
        if self.adapters is not None:
            self.adapters.load(plans, weights)

    def missing_adapters(self, step: StepOnDevice) -> Mapping[int, str]:
        if self.adapters is None or step.arrays is None or step.arrays.adapters is None:
            return {}
        return self.adapters.missing(step.arrays.adapters)

    def _embeds(self, tokens: NDArray[np.int64], rows: NDArray[np.float32] | None) -> Embeds:
        if rows is None:
            # Replaced by rank 0's rows when the step is computed.
            rows = np.zeros((len(tokens), self.hidden_size), np.float32)
        return Embeds(*arrays_to_device([tokens, rows], self.device))

    def logits(self, moves: Iterable[Move], step: StepOnDevice | None, take: TakeRows = ignore_rows) -> Tensor | None:
        """See `Forward.logits`. Undefined on ranks other than 0."""
        self.cache.move(moves)
        if step is None:
            return None
        if step.follows:
            # Only rank 0 samples, so it broadcasts the tokens that the previous step has sampled.
            self.shard.broadcast(step.tensors.token_ids)
        tensors = step.tensors
        if tensors.embeds is not None:
            # Too large for the channel on which steps are sent.
            self.shard.broadcast(tensors.embeds.rows)
        taps = Taps(self.output_layers, tensors.kept_tokens) if step.keeps_layers else None
        hidden = self(step, taps)
        if tensors.kept_tokens is not None:
            layers = NO_LAYERS if taps is None else taps.rows
            size = rows_per_block(self.vocab_size)
            for block, tokens in enumerate(tensors.kept_tokens.split(size)):
                kept = hidden.index_select(0, tokens)
                start = block * size
                take(kept, self.model.logits(kept), rows_between(layers, start, start + len(tokens)))
        rows = hidden if tensors.last_tokens is None else hidden.index_select(0, tensors.last_tokens)
        return self.model.logits(rows) if len(rows) else None

    def take_saved(self) -> Saved | None:
        return self.cache.take_saved()

    def __call__(self, step: StepOnDevice, taps: Taps | None = None) -> Tensor:
        """Compute the hidden states [T, hidden], in memory that the next step may overwrite."""
        tensors = step.tensors
        if step.graphs is not None:
            return step.graphs(tensors)[: step.num_tokens]
        if step.arrays is None and tensors.embeds is None and taps is None:
            return self.model(tensors.token_ids, tensors.positions, self.cache, step.inputs)
        adapters = None if step.arrays is None else self._adapters_of(step.arrays)
        return self.model(tensors.token_ids, tensors.positions, self.cache, step.inputs, adapters, tensors.embeds, taps)

    def _adapters_of(self, arrays: StepArrays) -> StepAdapters | None:
        """None if all adapters of the step are missing."""
        if self.adapters is None or arrays.adapters is None:
            raise RuntimeError("a step uses LoRA adapters, but this engine was started without lora = true")
        return self.adapters.step(arrays.adapters, arrays.query_start)
