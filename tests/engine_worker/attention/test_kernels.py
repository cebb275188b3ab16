"""The wrappers of third-party kernels, with fakes of the functions that they call, against the reference."""

import dataclasses
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import varlen as torch_varlen
from torch.torch_version import TorchVersion

from engine_worker.attention import flash
from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import store_by_torch
from engine_worker.attention.paged import Kernel, PagedAttention
from engine_worker.attention.reference import ReferenceAttention
from tests.engine_worker.attention import flash_fakes
from tests.engine_worker.attention.paged import attend, drop_blocks_before_window, paged_step
from tests.examples import examples

FLASH = {kernel.title: kernel for kernel in flash.KERNELS}
SHARED = HeadShape(4, 2, 16)
sequence = st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(1, 40)))
generation = st.lists(st.tuples(st.integers(0, 600), st.just(1)), min_size=1, max_size=5)
steps = st.one_of(generation, st.lists(sequence, min_size=1, max_size=5))


@pytest.fixture(params=["FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "2.12.1", "2.13.0", "2.14.0"])
def kernel(request, monkeypatch) -> Kernel:
    monkeypatch.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_fakes.flash3())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", flash_fakes.flash4())
    if request.param in FLASH:
        return FLASH[request.param]
    monkeypatch.setattr(torch, "__version__", TorchVersion(request.param))
    major, minor, _ = request.param.split(".")
    monkeypatch.setattr(torch_varlen, "varlen_attn", flash_fakes.varlen((int(major), int(minor))))
    return flash.VARLEN


def assert_same(kernel: Kernel, heads: HeadShape, step, window=None) -> None:
    expected, expected_cache = attend(ReferenceAttention(heads), step, window)
    out, cache = attend(PagedAttention(kernel, heads, store_by_torch), step, window)
    real = int(step.inputs.query_start[-1])
    torch.testing.assert_close(out[:real], expected[:real], atol=1e-2, rtol=1e-2)
    assert torch.equal(cache.keys, expected_cache.keys)
    assert torch.equal(cache.values, expected_cache.values)


# The function-scoped fixture only replaces imported modules, so all examples of a test can share it.
@examples(25, suppress_health_check=["function_scoped_fixture"])
@given(
    sequences=steps,
    pages=st.integers(1, 2),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    padding=st.integers(0, 3),
    window=st.one_of(st.none(), st.integers(1, 700)),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_agrees_with_the_reference(kernel, sequences, pages, num_kv_heads, group, padding, window, seed, dtype):
    heads = HeadShape(num_kv_heads * group, num_kv_heads, 8)
    size = kernel.tokens_per_block * pages
    # Steps of single tokens can be padded with empty sequences only, as in the next test: FlashAttention-2 needs that.
    padding = padding if any(count > 1 for _, count in sequences) else 0
    step = paged_step(heads, sequences, tokens_per_block=size, padding=padding, seed=seed, dtype=dtype)
    assert_same(kernel, heads, step if window is None else drop_blocks_before_window(step, window), window)


@pytest.mark.parametrize("window", [None, 20])
def test_inputs_of_a_cuda_graph_with_padding_rows_and_the_widest_table(kernel, window):
    """In a replayed graph, padding is a sequence with context length 0, and block tables have their maximum width."""
    step = paged_step(SHARED, [(300, 1), (3, 1), (0, 1)], tokens_per_block=256, dtype=torch.bfloat16)
    inputs = step.inputs
    slots, lengths = inputs.slots.clone(), inputs.context_lengths.clone()
    slots[2], lengths[2] = -1, 0
    tables = torch.zeros(3, 8, dtype=torch.int32)
    tables[:, : inputs.block_tables.shape[1]] = inputs.block_tables.clamp(min=0)
    wide = dataclasses.replace(inputs, slots=slots, context_lengths=lengths, block_tables=tables, max_context=8 * 256)
    expected, expected_cache = attend(ReferenceAttention(SHARED), step, window)
    out, cache = attend(PagedAttention(kernel, SHARED, store_by_torch), dataclasses.replace(step, inputs=wide), window)
    torch.testing.assert_close(out[:2], expected[:2], atol=1e-2, rtol=1e-2)
    unwritten = torch.ones(cache.keys.shape[:2], dtype=torch.bool).view(-1)
    unwritten[slots[:2]] = False
    assert torch.equal(cache.keys.flatten(0, 1)[unwritten], step.pool.layers[0].keys.flatten(0, 1)[unwritten])
    assert torch.equal(cache.keys.flatten(0, 1)[slots[:2]], expected_cache.keys.flatten(0, 1)[slots[:2]])


def test_a_custom_scale(kernel):
    heads = dataclasses.replace(SHARED, scaling=0.9)
    step = paged_step(heads, [(300, 1), (3, 7)], tokens_per_block=256, dtype=torch.bfloat16)
    assert_same(kernel, heads, step)


def test_one_prepared_step_serves_layers_with_different_windows(kernel):
    step = paged_step(SHARED, [(300, 1), (90, 33)], tokens_per_block=256, dtype=torch.bfloat16)
    backend = PagedAttention(kernel, SHARED, store_by_torch)
    inputs, cache = backend.prepare(step.inputs, step.pool), step.pool.layers[0]
    for window in (None, 20, 50, None):
        expected, _ = attend(ReferenceAttention(SHARED), step, window)
        out = backend.attend(step.query, step.key, step.value, cache, inputs, window)
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_preparing_a_generation_step_creates_no_tensor(kernel):
    """`prepare` runs before capture, so a replayed graph would read a tensor created there with its old content."""
    step = paged_step(SHARED, [(300, 1), (3, 1)], tokens_per_block=256)
    prepared = PagedAttention(kernel, SHARED, store_by_torch).prepare(step.inputs, step.pool)
    inputs = {id(getattr(step.inputs, field.name)) for field in dataclasses.fields(step.inputs)} | {id(None)}
    assert {id(getattr(prepared, field.name)) for field in dataclasses.fields(prepared)} <= inputs


def test_key_start_is_computed_only_for_kernels_that_need_it(kernel):
    """Computing it takes two launches in every step with context."""
    step = paged_step(SHARED, [(30, 2)], tokens_per_block=256)
    prepared = PagedAttention(kernel, SHARED, store_by_torch).prepare(step.inputs, step.pool)
    assert (prepared.key_start is None) == (kernel.title in ("FlashAttention-3", "FlashAttention-4"))


def test_attend_without_prepare_raises(kernel):
    step = paged_step(SHARED, [(3, 1)], tokens_per_block=256)
    with pytest.raises(TypeError, match="prepare"):
        PagedAttention(kernel, SHARED, store_by_torch).attend(
            step.query, step.key, step.value, step.pool.layers[0], step.inputs, None
        )
