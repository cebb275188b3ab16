"""Wrappers of FlashAttention (arXiv:2307.08691, arXiv:2407.08608): the releases 2, 3 and 4, and torch's varlen_attn.
No other module imports their packages or torch.nn.attention.varlen.

Names and limits differ between the releases. All of them align the causal mask to the bottom right, and do not count
the token itself in the window's size.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from engine_worker.attention.backend import Refusal, RefusedError
from engine_worker.attention.cache import LayerCache
from engine_worker.attention.paged import Attend, Kernel, PagedInputs

PAGED_SINCE = "2.12"
"""The first version of torch whose varlen_attn takes block tables."""


def _flash2() -> Attend:
    """FlashAttention-2, from the package flash-attn 2.6 or later."""
    import flash_attn

    # If only FlashAttention-4 is installed, flash_attn is a namespace package that contains just `cute`.
    if hasattr(flash_attn, "__path__") and getattr(flash_attn, "__file__", None) is None:
        raise ModuleNotFoundError("the package flash_attn contains only FlashAttention-4")
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def attend(query: Tensor, cache: LayerCache, inputs: PagedInputs, scale: float, window: int | None) -> Tensor:
        shared = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "block_table": inputs.block_tables,
        }
        out: Tensor
        if inputs.generation:
            # Unlike flash_attn_varlen_func, this function splits long contexts over the GPU.
            out = flash_attn_with_kvcache(
                query[:, None], cache.keys, cache.values, cache_seqlens=inputs.context_lengths, **shared
            )
            return out[:, 0]
        out = flash_attn_varlen_func(
            query,
            cache.keys,
            cache.values,
            cu_seqlens_q=inputs.query_start,
            cu_seqlens_k=inputs.key_start,
            max_seqlen_q=inputs.max_query,
            max_seqlen_k=inputs.max_context,
            **shared,
        )
        return out

    return attend


def _flash3() -> Attend:
    """FlashAttention-3, built from the `hopper` folder of the flash-attention repository."""
    from flash_attn_interface import flash_attn_with_kvcache

    def attend(query: Tensor, cache: LayerCache, inputs: PagedInputs, scale: float, window: int | None) -> Tensor:
        ragged = {} if inputs.generation else {"cu_seqlens_q": inputs.query_start, "max_seqlen_q": inputs.max_query}
        out: Tensor = flash_attn_with_kvcache(
            query[:, None] if inputs.generation else query,
            cache.keys,
            cache.values,
            cache_seqlens=inputs.context_lengths,
            page_table=inputs.block_tables,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            **ragged,
        )
        return out[:, 0] if inputs.generation else out

    return attend


def _flash4() -> Attend:
    """FlashAttention-4, from the package flash-attn-4."""
    from flash_attn.cute import flash_attn_varlen_func

    def attend(query: Tensor, cache: LayerCache, inputs: PagedInputs, scale: float, window: int | None) -> Tensor:
        out = flash_attn_varlen_func(
            query,
            cache.keys,
            cache.values,
            cu_seqlens_q=inputs.query_start,
            seqused_k=inputs.context_lengths,
            max_seqlen_q=inputs.max_query,
            max_seqlen_k=inputs.max_context,
            page_table=inputs.block_tables,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            # 0: as many splits as keep the GPU busy. Context rows keep it busy without splits.
            num_splits=0 if inputs.generation else 1,
        )
        # Some releases return a tuple that contains the log-sum-exp as well.
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended

    return attend


def _varlen() -> Attend:
    """torch's built-in FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn

    if not {"block_table", "seqused_k", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        reason = f"varlen_attn of torch {torch.__version__} has no block_table: torch {PAGED_SINCE} or later is needed"
        raise RefusedError(Refusal.ABSENT, reason)
    # From 2.13 on torch splits long contexts by default, and then writes the output of the first sequence only (pytorch
    # issue 194167), except on the packed path, which has a batch dimension. 2.12 never splits, and refuses the option.
    unsplit: dict[str, Any] = {"num_splits": 1} if torch.__version__ >= "2.13" else {}

    def attend(query: Tensor, cache: LayerCache, inputs: PagedInputs, scale: float, window: int | None) -> Tensor:
        # torch packs the query heads of a KV head into one program, and splits their keys, only if each query is a
        # single token and the window is unbounded on both sides. A single token is the last of its context, so it needs
        # no causal bound.
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
    """Whether, in a generation step, torch reads each KV head once and splits long contexts over the GPU. Otherwise it
    runs one program per sequence and query head, each of which reads its KV head."""
    return num_heads > num_kv_heads and window is None


VARLEN = Kernel(
    "varlen",
    "torch's varlen_attn",
    _varlen,
    frozenset({8, 9, 10, 11, 12}),
    tokens_per_block=256,
    key_start=True,
    splits=lambda heads, windows: all(packs(heads.num_heads, heads.num_kv_heads, window) for window in windows),
)
KERNELS = (
    Kernel("flash", "FlashAttention-3", _flash3, frozenset({9}), tokens_per_block=1),
    # Not on Hopper, where FlashAttention-4 does not split long contexts, unlike every other kernel here.
    Kernel("flash", "FlashAttention-4", _flash4, frozenset({10, 11}), tokens_per_block=1),
    Kernel("flash", "FlashAttention-2", _flash2, frozenset({8, 9, 10, 11, 12}), tokens_per_block=256, key_start=True),
    VARLEN,
)
"""Best first."""
