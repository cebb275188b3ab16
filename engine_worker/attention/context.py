"""Context slices on a CPU: several query tokens of one sequence, by torch's scaled_dot_product_attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import LayerCache

TILE = 256
"""Query tokens per call. Keys past a tile's last token, or behind the window of its first, are skipped."""


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """One sequence: the step's tokens [begin, end) are the last of the `length` tokens in its blocks."""

    begin: int
    end: int
    length: int
    blocks: Tensor | slice
    """[ceil(length / tokens_per_block)] int64; or, if they are contiguous, a slice of the pool, which needs no copy."""
    window: int | None

    @property
    def widest(self) -> int:
        """Most keys that a tile needs."""
        return self.length if self.window is None else min(self.length, TILE + self.window - 1)


def plan_context(
    begin: int, end: int, length: int, block_table: Tensor, tokens_per_block: int, window: int | None
) -> ContextPlan:
    """block_table [M] int32; blocks behind the window of the first token are dropped."""
    first = 0 if window is None else max(0, length - (end - begin) - window + 1)
    skipped = first // tokens_per_block
    blocks = block_table[skipped : -(-length // tokens_per_block)].long()
    length -= skipped * tokens_per_block
    start = int(blocks[0])
    if torch.equal(blocks, torch.arange(start, start + len(blocks))):
        return ContextPlan(begin, end, length, slice(start, start + len(blocks)), window)
    return ContextPlan(begin, end, length, blocks, window)


def causal_mask(length: int, dtype: torch.dtype, window: int | None) -> Tensor:
    """[TILE, length], added to scores: 0 where a query sees a key, else -inf.

    Aligned bottom right, so that `mask[-rows:, -keys:]` fits every tile of `rows` tokens that ends at the last of
    `keys` keys.
    """
    # Key `own + i` is query row i's own.
    own = length - TILE
    seen = torch.ones(TILE, length, dtype=torch.bool).tril(own)
    if window is not None:
        seen = seen.triu(own - window + 1)
    return torch.zeros(TILE, length, dtype=dtype).masked_fill_(~seen, -torch.inf)


def attend_context(query: Tensor, cache: LayerCache, plan: ContextPlan, mask: Tensor, heads: HeadShape) -> Tensor:
    """Query [Q, heads, head_dim] of this sequence -> the same shape. The mask is at least `plan.widest` wide."""
    keys, values = (pool[plan.blocks].flatten(0, 1).transpose(0, 1)[None] for pool in (cache.keys, cache.values))
    # Tiles keep the mask small and skip keys that causality or the window rules out.
    past = plan.length - len(query)
    tiles = []
    for begin in range(0, len(query), TILE):
        rows = query[begin : begin + TILE]
        last = past + begin + len(rows)
        first = 0 if plan.window is None else max(0, past + begin - plan.window + 1)
        tile = F.scaled_dot_product_attention(
            rows.transpose(0, 1)[None],
            keys[:, :, first:last],
            values[:, :, first:last],
            attn_mask=mask[TILE - len(rows) :, mask.shape[1] - (last - first) :],
            scale=heads.scale,
            enable_gqa=heads.group > 1,
        )
        tiles.append(tile[0].transpose(0, 1))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)
