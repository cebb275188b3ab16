"""FlashAttention (arXiv:2307.08691, arXiv:2407.08608) by its own packages; the only importer of them.

Each release has its own names and limits. All mask causally from the bottom right, and count a window without the
token itself.
"""

from torch import Tensor

from engine_worker.attention.cache import LayerCache
from engine_worker.attention.inputs import PagedInputs
from engine_worker.attention.paged import Attend, Kernel


def _flash2() -> Attend:
    """flash-attn, from 2.6 on."""
    import flash_attn

    # FlashAttention-4 alone makes a namespace package of this name, with a folder `cute` and nothing else.
    if hasattr(flash_attn, "__path__") and getattr(flash_attn, "__file__", None) is None:
        raise ModuleNotFoundError("the package flash_attn has nothing but FlashAttention-4")
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
            # Splits long contexts over the GPU, which the other function does not.
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
    """FlashAttention-3, built from the `hopper` folder of its repository."""
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
    """FlashAttention-4, package flash-attn-4."""
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
            # 0: as many as keep the GPU busy.
            num_splits=0 if inputs.generation else 1,
        )
        # With the logarithm of the sum of the exponentials, or, in some releases, without.
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    return attend


KERNELS = (
    Kernel("flash", "FlashAttention-3", _flash3, frozenset({9}), tokens_per_block=1),
    # On Hopper it does not split contexts, which all the others do.
    Kernel("flash", "FlashAttention-4", _flash4, frozenset({10, 11}), tokens_per_block=1),
    Kernel("flash", "FlashAttention-2", _flash2, frozenset({8, 9, 10, 11, 12}), tokens_per_block=256, key_start=True),
)
"""Best first."""
