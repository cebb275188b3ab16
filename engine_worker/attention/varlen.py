"""FlashAttention as built into torch; the only user of torch.nn.attention.varlen."""

import inspect
from typing import Any

import torch
from torch import Tensor

from engine_worker.attention.backend import Refusal, RefusedError
from engine_worker.attention.cache import LayerCache
from engine_worker.attention.paged import Attend, Kernel, PagedInputs

PAGED_SINCE = "2.12"


def _varlen() -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    if not {"block_table", "seqused_k", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        reason = f"torch {torch.__version__} has it without block_table: it takes torch {PAGED_SINCE}"
        raise RefusedError(Refusal.ABSENT, reason)
    # From 2.13 on torch splits long contexts by default, and then writes the output of the first sequence only (pytorch
    # issue 194167), except on the packed path, which has a batch dimension. 2.12 never splits, and refuses the option.
    unsplit: dict[str, Any] = {"num_splits": 1} if torch.__version__ >= "2.13" else {}

    def attend(query: Tensor, cache: LayerCache, inputs: PagedInputs, scale: float, window: int | None) -> Tensor:
        # torch packs the query heads of a KV head into one program, and splits their keys, for single tokens without a
        # bound on either side. A single token sees its whole context, so no bound is needed.
        packed = inputs.generation and packs(query.shape[1], cache.keys.shape[2], window)
        causal = (-1, 0) if window is None else (window - 1, 0)
        out = varlen_attn(
            query,
            cache.keys,
            cache.values,
            inputs.query_start,
            inputs.key_start,
            inputs.max_query,
            inputs.max_context,
            scale=scale,
            window_size=(-1, -1) if packed else causal,
            enable_gqa=True,
            seqused_k=inputs.context_lengths,
            block_table=inputs.block_tables,
            **({} if packed else unsplit),
        )
        return out if isinstance(out, Tensor) else out[0]

    return attend


def packs(num_heads: int, num_kv_heads: int, window: int | None) -> bool:
    """Whether torch reads each KV head once in a generation step, and splits long contexts over the GPU. Otherwise it
    reads a KV head once per query head, in one program per sequence and query head."""
    return num_heads > num_kv_heads and window is None


KERNEL = Kernel(
    "varlen",
    "torch's varlen_attn",
    _varlen,
    frozenset({8, 9, 10, 11, 12}),
    tokens_per_block=256,
    key_start=True,
    splits=lambda heads, windows: all(packs(heads.num_heads, heads.num_kv_heads, window) for window in windows),
)
