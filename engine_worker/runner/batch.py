"""A step as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.inputs import AttentionInputs
from engine_worker.step import Draw, Slice


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of B slices, and what to sample after which."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    attention: AttentionInputs
    last_tokens: Tensor | None
    """[R] int64: the tokens whose logits are needed; None when they are all T."""
    draws: list[Draw]
    draw_rows: list[int]
    """Row of the logits, 0 to R - 1, of each draw."""


def build(slices: Sequence[Slice], tokens_per_block: int, window: int | None, device: torch.device) -> Batch:
    """Slices of at least one token each. Their block tables begin for attention where `window`, the widest of all
    layers, of their first token does: what lies behind costs nothing."""
    size = len(slices)
    counts = np.fromiter((len(part.tokens) for part in slices), np.int64, size)
    starts = np.fromiter((part.start for part in slices), np.int64, size)
    skipped = np.zeros(size, np.int64) if window is None else np.maximum(starts - window + 1, 0) // tokens_per_block
    ends = np.cumsum(counts)
    total = int(ends[-1])
    token_ids = np.fromiter(chain.from_iterable(part.tokens for part in slices), np.int64, total)
    positions = starts if total == size else np.arange(total) + np.repeat(starts - ends + counts, counts)
    rows = np.arange(size) if total == size else np.repeat(np.arange(size), counts)
    lengths = starts + counts - skipped * tokens_per_block
    block_tables = _padded([part.block_table for part in slices], skipped, -(-lengths // tokens_per_block))
    slots = block_tables[rows, positions // tokens_per_block - skipped[rows]].astype(np.int64)
    slots = slots * tokens_per_block + positions % tokens_per_block

    draws = [draw for part in slices for draw in part.draws]
    drawing = [i for i, part in enumerate(slices) if part.draws]
    return Batch(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        attention=AttentionInputs(
            slots=_tensor(slots, device),
            block_tables=_tensor(block_tables, device),
            query_start=_tensor(np.concatenate(([0], ends)).astype(np.int32), device),
            context_lengths=_tensor(lengths.astype(np.int32), device),
            max_query=int(counts.max()),
            max_context=int(lengths.max()),
        ),
        last_tokens=None if len(drawing) == total else _tensor((ends - 1)[drawing], device),
        draws=draws,
        draw_rows=[row for row, i in enumerate(drawing) for _ in slices[i].draws],
    )


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _padded(tables: list[Sequence[int]], skipped: NDArray[np.int64], used: NDArray[np.int64]) -> NDArray[np.int32]:
    """Of each table the `used` blocks after the first `skipped`, [B, M]; the rest is zeros."""
    out = np.zeros((len(tables), int(used.max())), np.int32)
    inside = np.arange(out.shape[1]) < used[:, None]
    parts = zip(tables, skipped.tolist(), used.tolist(), strict=True)
    blocks = chain.from_iterable(table[first : first + count] for table, first, count in parts)
    out[inside] = np.fromiter(blocks, np.int32, int(used.sum()))
    return out
