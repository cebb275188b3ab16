import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cpu import TILE, CpuAttention
from engine_worker.attention.reference import ReferenceAttention
from tests.engine_worker.attention.paged import PagedStep, attend, drop_blocks_before_window, paged_step, pools
from tests.examples import examples

HEADS = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16)


def assert_same(heads: HeadShape, step: PagedStep, tolerance: float = 1e-5, window: int | None = None) -> None:
    expected, expected_cache = attend(ReferenceAttention(heads), step, window)
    out, cache = attend(CpuAttention(heads, [window]), step, window)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(cache.keys, expected_cache.keys)
    assert torch.equal(cache.values, expected_cache.values)


sequence = st.tuples(st.integers(0, 130), st.one_of(st.just(1), st.integers(1, 40)))


@examples(150)
@given(
    sequences=st.lists(sequence, min_size=1, max_size=7),
    tokens_per_block=st.sampled_from([1, 3, 8, 16]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 5]),
    padding=st.integers(0, 3),
    scattered=st.booleans(),
    seed=st.integers(0, 1000),
    window=st.one_of(st.none(), st.integers(1, 180)),
)
def test_agrees_with_the_reference(sequences, tokens_per_block, num_kv_heads, group, padding, scattered, seed, window):
    heads = HeadShape(num_kv_heads * group, num_kv_heads, 8)
    step = paged_step(
        heads, sequences, tokens_per_block=tokens_per_block, padding=padding, scattered=scattered, seed=seed
    )
    assert_same(heads, step if window is None else drop_blocks_before_window(step, window), window=window)


@pytest.mark.parametrize("past", [0, 1, 300])
@pytest.mark.parametrize("query", [TILE - 1, TILE, TILE + 1, 2 * TILE + 3])
def test_slices_longer_than_a_tile(past, query):
    assert_same(HEADS, paged_step(HEADS, [(past, query), (5, 1)]))


@pytest.mark.parametrize("window", [1, 7, TILE, TILE + 5, 4 * TILE])
@pytest.mark.parametrize("query", [TILE, 2 * TILE + 3])
def test_slices_longer_than_a_tile_with_a_window(query, window):
    step = paged_step(HEADS, [(300, query), (5, 1), (0, query)])
    assert_same(HEADS, drop_blocks_before_window(step, window), window=window)


@pytest.mark.parametrize("window", [None, 5])
def test_half_precision(window):
    step = paged_step(HEADS, [(40, 1), (7, 9)], dtype=torch.bfloat16)
    assert_same(HEADS, step, tolerance=3e-2, window=window)


def test_the_reference_is_causal_attention():
    step = paged_step(HeadShape(2, 2, 8), [(0, 12)])
    out, _ = attend(ReferenceAttention(HeadShape(2, 2, 8)), step)
    q, k, v = (x.transpose(0, 1)[None] for x in (step.query, step.key, step.value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("window", [1, 4, 12])
def test_the_reference_with_a_window_is_causal_attention_to_the_last_keys(window):
    step = paged_step(HeadShape(2, 2, 8), [(0, 12)])
    out, _ = attend(ReferenceAttention(HeadShape(2, 2, 8)), step, window)
    for i in range(12):
        visible = slice(max(0, i - window + 1), i + 1)
        scores = torch.einsum("hd,lhd->hl", step.query[i], step.key[visible]) * 8**-0.5
        torch.testing.assert_close(out[i], torch.einsum("hl,lhd->hd", scores.softmax(-1), step.value[visible]))


@pytest.mark.parametrize("backend", [ReferenceAttention(HEADS), CpuAttention(HEADS, [None, 20, 50])])
def test_layers_with_different_windows_share_a_step(backend):
    step = paged_step(HEADS, [(100, 1), (30, 1), (90, 33), (10, 4)])
    inputs, cache = backend.prepare(step.inputs, step.pool), step.pool.layers[0]
    for window in (None, 20, 50, None):
        expected, _ = attend(ReferenceAttention(HEADS), step, window)
        out = backend.attend(step.query, step.key, step.value, cache, inputs, window)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [ReferenceAttention(HEADS), CpuAttention(HEADS)])
def test_padding_writes_nothing(backend):
    step = paged_step(HEADS, [(20, 1), (3, 1), (0, 1)])
    slots = step.inputs.slots.clone()
    slots[1:] = -1
    lengths = step.inputs.context_lengths.clone()
    lengths[2] = 0
    padded = dataclasses.replace(step, inputs=dataclasses.replace(step.inputs, slots=slots, context_lengths=lengths))
    _, cache = attend(backend, padded)
    untouched = torch.ones(cache.keys.shape[:2], dtype=torch.bool).view(-1)
    untouched[slots[0]] = False
    for before, after, written in zip(pools(step.pool.layers[0]), pools(cache), (step.key, step.value), strict=True):
        assert torch.equal(after.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])
        assert torch.equal(after.flatten(0, 1)[slots[0]], written[0])


@pytest.mark.parametrize("window", [None, 40])
def test_a_row_does_not_depend_on_its_batch(window):
    """A generation row's output has the same bits alone and in a batch."""
    sequences = [(length, 1) for length in (0, 5, 15, 16, 17, 200, 33, 700, 64)]
    step = paged_step(HEADS, sequences)
    together, _ = attend(CpuAttention(HEADS, [window]), step, window)
    for i in range(len(sequences)):
        row = slice(i, i + 1)
        inputs = dataclasses.replace(
            step.inputs,
            slots=step.inputs.slots[row],
            block_tables=step.inputs.block_tables[row],
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_lengths=step.inputs.context_lengths[row],
            max_context=int(step.inputs.context_lengths[i]),
        )
        single = PagedStep(step.query[row], step.key[row], step.value[row], step.pool, inputs)
        alone, _ = attend(CpuAttention(HEADS, [window]), single, window)
        assert torch.equal(alone[0], together[i])


def test_nan_in_one_sequences_blocks_affects_only_its_own_row():
    step = paged_step(HEADS, [(20, 1), (9, 1), (30, 4)])
    poisoned = step.inputs.block_tables[0, :2].long()
    for pool in pools(step.pool.layers[0]):
        pool[poisoned] = torch.nan
    out, _ = attend(CpuAttention(HEADS), step)
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


@pytest.mark.parametrize("backend", [ReferenceAttention(HEADS), CpuAttention(HEADS, [20])])
def test_keys_before_the_window_are_not_read(backend):
    """NaN in every slot before the window does not change the output."""
    step = paged_step(HEADS, [(100, 1), (90, 3)])
    clean, _ = attend(backend, step, 20)
    for pool in pools(step.pool.layers[0]):
        for table, first in zip(step.inputs.block_tables, (100 - 19, 90 - 19), strict=True):
            for position in range(first):
                pool[table[position // 16], position % 16] = torch.nan
    out, _ = attend(backend, step, 20)
    assert torch.equal(out, clean)


def test_generation_reads_no_more_keys_than_the_window_has():
    backend = CpuAttention(HEADS, [20])
    for past in (19, 100, 1000):
        step = paged_step(HEADS, [(past, 1)])
        plan = backend.prepare(step.inputs, step.pool).plans[20]
        assert len(plan.generation.table_rows) == 20 * HEADS.num_heads
        assert plan.generation.scores.numel() <= 64 * HEADS.num_heads
