"""FlashAttention as torch has it built in; the only user of torch.nn.attention.varlen."""

import inspect
from typing import Any

import torch
from torch import Tensor

from engine_worker.attention.cache import LayerCache
from engine_worker.attention.paged import Attend, Kernel, PagedInputs
from engine_worker.attention.refusal import Refusal, RefusedError

PAGED_SINCE = "2.12"


def _varlen() -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    if not {"block_table", "seqused_k", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        reason = f"torch {torch.__version__} has it without block_table: it takes torch {PAGED_SINCE}"
        raise RefusedError(Refusal.ABSENT, reason)
    # From 2.13 on torch splits long contexts where nobody says otherwise, and then gets those of several sequences
    # wrong (pytorch issue 194167). 2.12 never does, and refuses to be told.
    splits: dict[str, Any] = {"num_splits": 1} if torch.__version__ >= "2.13" else {}

    def attend(query: Tensor, cache: LayerCache, inputs: PagedInputs, scale: float, window: int | None) -> Tensor:
        out = varlen_attn(
            query,
            cache.keys,
            cache.values,
            inputs.query_start,
            inputs.key_start,
            inputs.max_query,
            inputs.max_context,
            scale=scale,
            window_size=(-1, 0) if window is None else (window - 1, 0),
            enable_gqa=True,
            seqused_k=inputs.context_lengths,
            block_table=inputs.block_tables,
            **splits,
        )
        return out if isinstance(out, Tensor) else out[0]

    return attend


KERNEL = Kernel(
    "varlen", "torch's varlen_attn", _varlen, frozenset({8, 9, 10, 11, 12}), tokens_per_block=256, key_start=True
)
