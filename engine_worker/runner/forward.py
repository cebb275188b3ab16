"""A step's arrays through the model: what every rank does in the same way."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionBackend
from engine_worker.attention.cache import KVCache
from engine_worker.attention.inputs import AttentionInputs
from engine_worker.attention.refusal import synchronize
from engine_worker.layers.shard import ALONE, Shard
from engine_worker.models.model import Model
from engine_worker.runner.arrays import Arrays
from engine_worker.runner.buffers import pad
from engine_worker.runner.graphs import Graphs
from engine_worker.runner.tensors import Tensors
from engine_worker.step import Move


class Prepared(NamedTuple):
    """A step on its device."""

    tensors: Tensors
    """Padded where a graph computes it."""
    inputs: AttentionInputs | None
    """What the backend made of them; None where a graph computes it."""
    num_tokens: int
    """Without padding."""
    follows: bool
    """Whether the step before gives some of them."""


class Forward:
    """A model, or a rank's shard of it, its KV cache and an attention backend, with graphs of some steps or without."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: AttentionBackend,
        device: torch.device,
        graphs: Graphs | None = None,
        shard: Shard = ALONE,
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.device = device
        self._graphs = graphs
        self._shard = shard

    def close(self) -> None:
        """Wait for the device, then drop the graphs: what they captured of NCCL cannot end before them. Nothing can be
        computed afterwards."""
        synchronize(self.device)
        self._graphs = None

    def prepare(self, arrays: Arrays) -> Prepared:
        """Everything that can be done before the step's turn."""
        count, follows = len(arrays.token_ids), len(arrays.follow_tokens) > 0
        size = None if self._graphs is None else self._graphs.fit(arrays)
        if size is not None:
            return Prepared(Tensors.of(pad(arrays, size), self.device), None, count, follows)
        tensors = Tensors.of(arrays, self.device)
        return Prepared(tensors, self.backend.prepare(tensors.attention, self.cache), count, follows)

    def logits(self, moves: Iterable[Move], step: Prepared | None) -> Tensor | None:
        """Move blocks, then compute a step: [R, vocab] float32 of the tokens whose logits are needed, None where there
        are none. Other ranks than 0 get the tokens that follow a draw from it, and logits that mean nothing."""
        self.cache.move(moves)
        if step is None:
            return None
        if step.follows:
            self._shard.share(step.tensors.token_ids)
        rows = self(step)
        return self.model.logits(rows) if len(rows) else None

    def __call__(self, step: Prepared) -> Tensor:
        """Hidden states [R, hidden] of the tokens whose logits are needed. They lie in memory that the next step may
        overwrite."""
        tensors = step.tensors
        if step.inputs is None and self._graphs is not None:
            hidden = self._graphs(tensors)[: step.num_tokens]
        else:
            hidden = self.model(tensors.token_ids, tensors.positions, self.cache, step.inputs or tensors.attention)
        return hidden if tensors.last_tokens is None else hidden.index_select(0, tensors.last_tokens)
