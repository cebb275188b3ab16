"""A step's arrays through the model, in the same way on every rank."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionBackend, AttentionInputs, synchronize
from engine_worker.attention.cache import KVCache
from engine_worker.layers.shard import UNSHARDED, Shard
from engine_worker.models.model import Model
from engine_worker.runner.batch import StepArrays, StepTensors
from engine_worker.runner.graphs import Graphs, pad
from engine_worker.runner.methods import Rank
from engine_worker.step import Move


class PreparedStep(NamedTuple):
    """A step on its device."""

    tensors: StepTensors
    """Padded if a graph computes it."""
    inputs: AttentionInputs | None
    """As the backend prepared them; None if a graph computes the step."""
    num_tokens: int
    """Without padding."""
    follows: bool
    """Whether the previous step draws some of its tokens."""


class Forward:
    """A model, or a rank's shard of it, with its KV cache, attention backend and CUDA graphs, if any."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: AttentionBackend,
        device: torch.device,
        graphs: Graphs | None = None,
        shard: Shard = UNSHARDED,
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.device = device
        self._graphs = graphs
        self.shard = shard
        self.rank = Rank(shard.rank, shard.size, device, model, cache)
        """For methods that are called by name."""

    def close(self) -> None:
        """Wait for the device and drop the graphs; nothing can be computed afterwards."""
        synchronize(self.device)
        # NCCL cannot shut down while a graph that captured one of its operations exists.
        self._graphs = None

    def prepare(self, arrays: StepArrays) -> PreparedStep:
        """Everything that can be done before the previous step has finished."""
        count, follows = len(arrays.token_ids), len(arrays.follow_tokens) > 0
        size = None if self._graphs is None else self._graphs.fit(arrays)
        if size is not None:
            return PreparedStep(StepTensors.of(pad(arrays, size), self.device), None, count, follows)
        tensors = StepTensors.of(arrays, self.device)
        return PreparedStep(tensors, self.backend.prepare(tensors.attention, self.cache), count, follows)

    def logits(self, moves: Iterable[Move], step: PreparedStep | None) -> Tensor | None:
        """Move blocks, then compute a step -> [R, vocab] float32 for the tokens whose logits are needed; None without
        any. Undefined on ranks other than 0."""
        self.cache.move(moves)
        if step is None:
            return None
        if step.follows:
            # Only rank 0 samples, so the others get the tokens that the previous step drew from it.
            self.shard.broadcast(step.tensors.token_ids)
        rows = self(step)
        return self.model.logits(rows) if len(rows) else None

    def __call__(self, step: PreparedStep) -> Tensor:
        """Hidden states [R, hidden] of the tokens whose logits are needed, in memory that the next step may
        overwrite."""
        tensors = step.tensors
        if step.inputs is None and self._graphs is not None:
            hidden = self._graphs(tensors)[: step.num_tokens]
        else:
            hidden = self.model(tensors.token_ids, tensors.positions, self.cache, step.inputs or tensors.attention)
        return hidden if tensors.last_tokens is None else hidden.index_select(0, tensors.last_tokens)
