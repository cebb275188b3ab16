"""Prompt tables with random rows."""

import numpy as np
import torch

from sluice.wire.tables import FloatType, Table


def floats(rows: int, hidden_size: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """[rows, hidden_size] float32."""
    return scale * torch.randn(rows, hidden_size, generator=torch.Generator().manual_seed(seed))


def table_of(rows: torch.Tensor) -> Table:
    """`rows`: [rows, hidden_size], float32, float16 or bfloat16."""
    names: dict[torch.dtype, FloatType] = {
        torch.float32: "float32",
        torch.float16: "float16",
        torch.bfloat16: "bfloat16",
    }
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return Table.of(rows.shape[0], rows.shape[1], names[rows.dtype], data)


def random_table(rows: int, hidden_size: int, seed: int) -> Table:
    data = np.random.default_rng(seed).standard_normal((rows, hidden_size)).astype("<f4").tobytes()
    return Table.of(rows, hidden_size, "float32", data)
