"""Token embedding."""

import torch
from torch import Tensor, nn

from engine_worker.layers.linear import parameter


class Embedding(nn.Module):
    """A row per token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight: Tensor = parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden], a copy."""
        return self.weight.index_select(0, token_ids)
