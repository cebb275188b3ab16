"""A step's arrays through the model: what every rank does in the same way."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionBackend
from engine_worker.attention.cache import KVCache
from engine_worker.attention.inputs import AttentionInputs
from engine_worker.models.model import Model
from engine_worker.runner.arrays import Arrays
from engine_worker.runner.buffers import pad
from engine_worker.runner.graphs import Graphs
from engine_worker.runner.tensors import Tensors


class Prepared(NamedTuple):
    """A step on its device."""

    tensors: Tensors
    """Padded where a graph computes it."""
    inputs: AttentionInputs | None
    """What the backend made of them; None where a graph computes it."""
    count: int
    """Tokens, without padding."""


class Forward:
    """A model, its KV cache and an attention backend, with graphs of some steps or without."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: AttentionBackend,
        device: torch.device,
        graphs: Graphs | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._backend = backend
        self._device = device
        self._graphs = graphs

    def prepare(self, arrays: Arrays) -> Prepared:
        """Everything that can be done before the step's turn."""
        count = len(arrays.token_ids)
        size = None if self._graphs is None else self._graphs.fit(arrays)
        if size is not None:
            return Prepared(Tensors.of(pad(arrays, size), self._device), None, count)
        tensors = Tensors.of(arrays, self._device)
        return Prepared(tensors, self._backend.prepare(tensors.attention, self._cache), count)

    def __call__(self, step: Prepared) -> Tensor:
        """Hidden states [R, hidden] of the tokens whose logits are needed. They lie in memory that the next step may
        overwrite."""
        tensors = step.tensors
        if step.inputs is None and self._graphs is not None:
            hidden = self._graphs(tensors)[: step.count]
        else:
            hidden = self._model(tensors.token_ids, tensors.positions, self._cache, step.inputs or tensors.attention)
        return hidden if tensors.last_tokens is None else hidden.index_select(0, tensors.last_tokens)
