"""Geometry: numbers of blocks for numbers of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kvcache.pool import Geometry

sizes = st.integers(1, 9)


def test_without_a_window_all_blocks_are_held():
    geometry = Geometry.fit(10, 4, None, 16)
    assert geometry.first_needed(1000) == 0
    assert geometry.table_length(8, 30) == geometry.blocks_for(30)
    assert geometry.max_blocks(30) == 8
    assert geometry.longest(10) == 40
    assert not geometry.bounded


@given(st.integers(1, 40), sizes, st.integers(1, 60), st.integers(1, 60), st.integers(1, 200))
def test_a_sequence_never_holds_more_than_max_blocks(num_blocks, size, window, chunk, length):
    """Computed in chunks, then token by token."""
    geometry = Geometry.fit(num_blocks, size, window, chunk)
    longest = geometry.longest(num_blocks)
    length = length if longest is None else min(length, longest)
    computed = most_held = 0
    while computed < length:
        held = geometry.table_length(computed, length) - geometry.first_needed(computed)
        most_held = max(most_held, held)
        computed = min(length, computed + (geometry.chunk or length))
    assert most_held <= geometry.max_blocks(length) <= num_blocks


@given(sizes, st.integers(1, 60), st.integers(0, 200))
def test_the_first_block_needed_is_the_first_in_the_window(size, window, position):
    geometry = Geometry(size, window, 1)
    assert geometry.first_needed(position) == max(0, position - window + 1) // size


@pytest.mark.parametrize(("num_blocks", "chunk", "longest"), [(10, 10, None), (4, 9, None), (2, 1, None), (1, None, 4)])
def test_chunks_are_limited_by_the_pool(num_blocks, chunk, longest):
    """A window of five tokens in blocks of four."""
    geometry = Geometry.fit(num_blocks, 4, 5, 10)
    assert geometry.chunk == chunk
    assert geometry.longest(num_blocks) == longest


def test_unchunked_contexts_need_room_for_the_whole_sequence():
    geometry = Geometry.fit(10, 4, 5, None)
    assert geometry.longest(10) == 40
    assert geometry.first_needed(20) == 4
