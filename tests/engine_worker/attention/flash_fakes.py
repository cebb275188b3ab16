"""Fakes of the third-party attention functions for GPUs, in plain torch. They reject the same inputs as the originals.

Signatures and limits are those of flash-attn 2.8, FlashAttention-3 and -4, and torch 2.12 and 2.13. Rows that the
original would leave uninitialized are NaN.
"""

from itertools import pairwise
from types import ModuleType

import torch

HALF = (torch.float16, torch.bfloat16)


def paged(query, keys, values, table, starts, lengths, scale, window):
    """Attention over a paged cache. query [T, heads, head_dim]; window: (left, right) as in flash-attn, -1: none."""
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    assert query.dtype == keys.dtype == values.dtype
    assert keys.shape == values.shape
    assert keys.dim() == 4
    _is_int32(table, 2)
    assert table.stride(-1) == 1
    assert len(table) == len(lengths) == len(starts) - 1
    page, kv_heads = keys.shape[1:3]
    assert query.shape[1] % kv_heads == 0
    out = torch.full_like(query, torch.nan)
    for i, length in enumerate(lengths):
        rows = query[starts[i] : starts[i + 1]].float()
        position = length - len(rows) + torch.arange(len(rows))[:, None]
        key = torch.arange(length)
        visible = torch.ones(len(rows), length, dtype=torch.bool)
        if window[0] >= 0:
            visible &= key >= position - window[0]
        if window[1] >= 0:
            visible &= key <= position + window[1]
        needed = key[visible.any(0)]
        slots = table[i].long()[needed // page], needed % page
        k, v = (pool[slots].float().repeat_interleave(query.shape[1] // kv_heads, 1) for pool in (keys, values))
        scores = torch.einsum("qhd,lhd->hql", rows, k) * scale
        weights = scores.masked_fill(~visible[:, needed], -torch.inf).softmax(-1).nan_to_num(0)
        out[starts[i] : starts[i + 1]] = torch.einsum("hql,lhd->qhd", weights, v).to(query.dtype)
    return out


def _is_int32(tensor, dim=1):
    assert tensor.dtype == torch.int32
    assert tensor.dim() == dim


def _starts(tensor, longest):
    _is_int32(tensor)
    assert tensor.is_contiguous()
    assert tensor[0] == 0
    assert tensor.diff().max() <= longest
    return tensor.tolist()


def _check_half(query, keys):
    if query.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise RuntimeError("head_size must be a multiple of 8")
    assert keys.shape[-1] == query.shape[-1]


def _check_page(keys):
    if keys.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")


def _flattened(query, lengths):
    """query [B, Q, heads, head_dim] -> [B * Q, heads, head_dim], and the index of each sequence's first token."""
    batch, count = query.shape[:2]
    assert len(lengths) == batch
    return query.flatten(0, 1), [i * count for i in range(batch + 1)]


def flash2() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        _check_half(q, k)
        _check_page(k)
        starts, ends = _starts(cu_seqlens_q, max_seqlen_q), _starts(cu_seqlens_k, max_seqlen_k)
        if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and max(window_size) < 0 and len(q) != len(starts) - 1:
            raise RuntimeError(f"shape '[{len(starts) - 1}, ...]' is invalid for input of {len(q)} tokens")
        lengths = [end - start for start, end in pairwise(ends)]
        return paged(q, k, v, block_table, starts, lengths, softmax_scale, (window_size[0], 0 if causal else -1))

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        _check_half(q, k_cache)
        _check_page(k_cache)
        _is_int32(cache_seqlens)
        flat, starts = _flattened(q, cache_seqlens)
        window = window_size[0], 0 if causal else -1
        out = paged(flat, k_cache, v_cache, block_table, starts, cache_seqlens.tolist(), softmax_scale, window)
        return out.view(q.shape)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash3() -> ModuleType:
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        _check_half(q, k_cache)
        _is_int32(cache_seqlens)
        if cu_seqlens_q is None:
            flat, starts = _flattened(q, cache_seqlens)
        else:
            assert q.dim() == 3
            flat, starts = q, _starts(cu_seqlens_q, max_seqlen_q)
        window = window_size[0], 0 if causal else -1
        out = paged(flat, k_cache, v_cache, page_table, starts, cache_seqlens.tolist(), softmax_scale, window)
        return out.view(q.shape)

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash4() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
        return_lse=False,
    ):  # fmt: skip
        _check_half(q, k)
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        _is_int32(seqused_k)
        starts = _starts(cu_seqlens_q, max_seqlen_q)
        assert max_seqlen_k is None or max_seqlen_k >= seqused_k.max()
        window_left = -1 if window_size[0] is None else window_size[0]
        window = window_left, 0 if causal else -1
        return paged(q, k, v, page_table, starts, seqused_k.tolist(), softmax_scale, window), None

    module = ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def varlen(version: tuple[int, int], packed: list[bool] | None = None):
    """varlen_attn of this version of torch. Block tables came with 2.12. Since 2.13, splitting corrupts the output of
    all sequences but the first, except where grouped heads are packed. `packed` receives, for each call, whether they
    were."""

    def torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                   window_size=(-1, -1)):  # fmt: skip
        raise AssertionError("this version has no block tables")

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        if not enable_gqa and query.size(1) != key.size(2):
            raise ValueError("Expect query and key/value to have the same number of heads")
        _check_half(query, key)
        _check_page(key)
        _is_int32(seqused_k)
        assert seqused_k.is_contiguous()
        if cu_seq_k is None:
            raise RuntimeError("cumulative_sequence_length_q and _k must be both set or both not set")
        _is_int32(cu_seq_k)
        assert cu_seq_k.shape == cu_seq_q.shape
        assert seqused_k.max() <= max_k
        if version < (2, 13) and num_splits is not None:
            raise RuntimeError("num_splits requires FA3")
        starts = _starts(cu_seq_q, max_q)
        out = paged(query, key, value, block_table, starts, seqused_k.tolist(), scale, window_size)
        packs = max_q == 1 and query.size(1) > key.size(2) and max(window_size) < 0
        if version >= (2, 13) and num_splits != 1 and not packs:
            out[starts[1] :] = torch.nan
        if packed is not None:
            packed.append(packs and num_splits is None)
        return out

    return torch_2_11 if version < (2, 12) else varlen_attn
