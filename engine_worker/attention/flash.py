"""FlashAttention (arXiv:2307.08691, arXiv:2407.08608) from its own packages; their only importer.

Each release has its own names and limits. All align the causal mask bottom right, and exclude the token itself from the
window's size.
"""

from torch import Tensor

from engine_worker.attention.cache import LayerCache
from engine_worker.attention.paged import Attend, Kernel, PagedInputs


def _flash2() -> Attend:
    """From package flash-attn, 2.6 or later."""
    import flash_attn

    # FlashAttention-4 on its own installs a namespace package of this name that contains only `cute`.
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
            # Unlike the varlen function, this one splits long contexts over the GPU.
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
    """From package flash-attn-4."""
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
            # 0: as many as keep the GPU busy. Context rows already do.
            num_splits=0 if inputs.generation else 1,
        )
        # Some releases return the log-sum-exp as well.
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    return attend


KERNELS = (
    Kernel("flash", "FlashAttention-3", _flash3, frozenset({9}), tokens_per_block=1),
    # Not on Hopper: there it does not split long contexts, as all the others do.
    Kernel("flash", "FlashAttention-4", _flash4, frozenset({10, 11}), tokens_per_block=1),
    Kernel("flash", "FlashAttention-2", _flash2, frozenset({8, 9, 10, 11, 12}), tokens_per_block=256, key_start=True),
)
"""Best first."""
