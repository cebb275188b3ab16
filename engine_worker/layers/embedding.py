"""Token embedding."""

import torch
from torch import Tensor

from engine_worker.layers.layer import Layer


class Embedding(Layer):
    """A row per token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden], a copy."""
        return self.weight.index_select(0, token_ids)
