"""Sluice's Triton kernels in Triton's interpreter, on a CPU; see `test_interpreted`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.attention import kernels, split
from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import KVCache, store_by_torch
from engine_worker.attention.paged import TRITON, PagedAttention
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.trial import as_captured
from tests.engine_worker.attention.paged import attend, drop_blocks_before_window, paged_step, pools
from tests.examples import examples

ONE_SPLIT = [(300, 1), (7, 1)]
MIXED = [(300, 1), (7, 1), (30, 40), (5, 1), (0, 3)]


def assert_same(heads, step, window=None, tolerance=1e-5) -> None:
    expected, expected_cache = attend(ReferenceAttention(heads), step, window)
    out, cache = attend(PagedAttention(TRITON, heads, kernels.store), step, window)
    real = int(step.inputs.query_start[-1])
    torch.testing.assert_close(out[:real], expected[:real], atol=tolerance, rtol=tolerance)
    assert torch.equal(cache.keys, expected_cache.keys)
    assert torch.equal(cache.values, expected_cache.values)
    captured = replace(step, inputs=as_captured(step.inputs))
    captured_out, _ = attend(PagedAttention(TRITON, heads, kernels.store), captured, window)
    torch.testing.assert_close(captured_out[:real], expected[:real], atol=tolerance, rtol=tolerance)


context = st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 60)))
row = st.tuples(st.integers(0, 300), st.just(1))


@examples(4)
@given(
    rows=st.lists(row, max_size=3),
    contexts=st.lists(context, max_size=2),
    tokens_per_block=st.sampled_from([1, 3, 16, 256]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([8, 16, 24]),
    padding=st.integers(0, 3),
    window=st.one_of(st.none(), st.integers(1, 250)),
    seed=st.integers(0, 1000),
)
def test_agrees_with_the_reference(
    rows, contexts, tokens_per_block, num_kv_heads, group, head_dim, padding, window, seed
):
    heads, sequences = HeadShape(num_kv_heads * group, num_kv_heads, head_dim), rows + contexts or [(0, 1)]
    step = paged_step(heads, sequences, tokens_per_block=tokens_per_block, padding=padding, seed=seed)
    assert_same(heads, step if window is None else drop_blocks_before_window(step, window), window)


@pytest.mark.quick(1)
@pytest.mark.parametrize("sequences", [ONE_SPLIT, MIXED])
@pytest.mark.parametrize("head_dim", [16, 256])
def test_half_precision(sequences, head_dim):
    heads = HeadShape(4, 2, head_dim)
    assert_same(heads, paged_step(heads, sequences, dtype=torch.float16), tolerance=5e-3)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("cores", "long", "window"), [(1, 4096, None), (1, 64, None), (4, 64, None), (1, 64, 200), (32, 64, 200)]
)
def test_results_do_not_depend_on_how_keys_are_split(monkeypatch, cores, long, window):
    """Shares per sequence: one; several for the long sequence only; several, and more for the long sequence; many."""
    monkeypatch.setattr(kernels, "_cores", lambda device: cores)
    for module in (kernels, split):
        monkeypatch.setattr(module, "LONG", long)
    heads = HeadShape(4, 2, 8)
    assert_same(heads, paged_step(heads, MIXED), window)


def test_a_captured_launch_for_generation_rows_does_not_overwrite_other_rows(monkeypatch):
    """Which sequences are generation rows is known on the device only, so splitting launches programs for every row."""
    monkeypatch.setattr(kernels, "_cores", lambda device: 64)
    heads = HeadShape(4, 2, 8)
    many = [(i, 1 + i % 5) for i in range(20)]
    for sequences in ([(300, 1)], [(5, 1), (5, 2)], [(0, 70), (3, 50)], MIXED[::-1], many):
        assert_same(heads, paged_step(heads, sequences, padding=2))


def test_generation_rows_are_split_in_steps_with_context_too(monkeypatch):
    launched = []
    monkeypatch.setattr(
        kernels, "_launch", lambda *args: launched.append((args[6], args[7], args[8] and args[8].split.max_shares))
    )
    monkeypatch.setattr(kernels, "_launch_combine", lambda *_: None)
    heads = HeadShape(4, 2, 16)
    attend(PagedAttention(TRITON, heads, store_by_torch), paged_step(heads, MIXED))
    assert launched == [(range(2), 1, 5), (range(2, 5), 40, None)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("head_dim", [16, 256])
def test_the_output_for_context_length_0_is_zeros(head_dim):
    """Such sequences are the padding of a graph. Also with split keys, where every share is empty."""
    heads = HeadShape(4, 2, head_dim)
    step = paged_step(heads, [(300, 1), (0, 1)])
    step.inputs.context_lengths[1] = 0
    step.inputs.slots[1] = -1
    out, _ = attend(PagedAttention(TRITON, heads, kernels.store), step)
    assert not out[1].any()
    assert out[0].any()


@pytest.mark.parametrize("strided", [False, True])
def test_the_store_writes_what_torch_writes(strided):
    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(5, 7, 24, generator=generator)
    key, value = fused[:, 2:5], torch.randn(5, 3, 24, generator=generator)
    if strided:
        key, value = key.transpose(1, 2).contiguous().transpose(1, 2), value.expand(5, 3, 24)
    slots = torch.tensor([7, -1, 0, 12, -1])
    caches = []
    for store in (store_by_torch, kernels.store):
        pool = KVCache(1, 4, 4, 3, 24, torch.float32, torch.device("cpu"))
        store(pool.layers[0], key, value, slots)
        caches.append(pool.layers[0])
    for expected, written in zip(*map(pools, caches), strict=True):
        assert torch.equal(written, expected)
        assert written.flatten(0, 1).flatten(1).any(1).sum() == 3
