"""Context slices on a CPU: several query tokens of one sequence, through torch's own flash attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import LayerCache

TILE = 256
"""Query tokens at a time; keys past a tile's last token are not touched."""


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """One sequence: tokens begin to end of the step, which are the last of its `length` tokens."""

    begin: int
    end: int
    length: int
    blocks: Tensor | slice
    """[ceil(length / tokens_per_block)] int64, or a slice of the pool where the blocks are neighbours: no copy is
    needed."""


def plan(begin: int, end: int, length: int, block_table: Tensor, tokens_per_block: int) -> ContextPlan:
    """block_table [M] int32."""
    blocks = block_table[: -(-length // tokens_per_block)].long()
    first = int(blocks[0])
    if torch.equal(blocks, torch.arange(first, first + len(blocks))):
        return ContextPlan(begin, end, length, slice(first, first + len(blocks)))
    return ContextPlan(begin, end, length, blocks)


def causal_mask(length: int, dtype: torch.dtype) -> Tensor:
    """[TILE, length] added to scores: row i of the last TILE tokens sees up to itself. Aligned bottom right, so that
    `mask[-rows:, -keys:]` serves every tile of `rows` tokens that ends at key `keys`."""
    hidden = torch.ones(TILE, length, dtype=torch.bool).triu(length - TILE + 1)
    return torch.zeros(TILE, length, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend(query: Tensor, cache: LayerCache, plan: ContextPlan, mask: Tensor, heads: HeadShape) -> Tensor:
    """Query [Q, heads, head_dim] of this sequence -> the same shape. The mask covers at least `plan.length` keys."""
    keys, values = (pool[plan.blocks].flatten(0, 1).transpose(0, 1)[None] for pool in (cache.keys, cache.values))
    past = plan.length - len(query)
    tiles = []
    for begin in range(0, len(query), TILE):
        rows = query[begin : begin + TILE]
        seen = past + begin + len(rows)
        tile = F.scaled_dot_product_attention(
            rows.transpose(0, 1)[None],
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=mask[TILE - len(rows) :, mask.shape[1] - seen :],
            scale=heads.scale,
            enable_gqa=heads.group > 1,
        )
        tiles.append(tile[0].transpose(0, 1))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)
