import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.formats.stored import stack
from engine_worker.layers.coded import TYPES
from tests.engine_worker.layers.coded_cases import ZEROS, random_matrix
from tests.examples import examples

kinds, groups, zeros = st.sampled_from(TYPES), st.sampled_from([8, 16, 24, 80]), st.sampled_from(ZEROS)


@examples(30)
@given(kind=kinds, group=groups, zeros=zeros, ordered=st.booleans(), data=st.data())
def test_rows(kind, group, zeros, ordered, data):
    stored = random_matrix(kind, 6, 80, group, zeros, ordered=ordered)
    index = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=1)))
    assert torch.equal(stored.rows(index).decode(), stored.decode()[index])
    longer = stored.with_rows(9).decode()
    assert torch.equal(longer[:6], stored.decode())
    assert not longer[6:].any()


@examples(30)
@given(kind=kinds, group=groups, zeros=zeros, first=st.integers(0, 39), count=st.integers(1, 40))
def test_columns(kind, group, zeros, first, count):
    stored, start, end = random_matrix(kind, 3, 80, group, zeros), 2 * first, 2 * min(40, first + count)
    part = stored.columns(start, end)
    assert part.shape == (3, end - start)
    assert torch.equal(part.decode(), stored.decode()[:, start:end])


@examples(30)
@given(kind=kinds, group=groups, zeros=st.lists(zeros, min_size=1, max_size=3))
def test_stack(kind, group, zeros):
    parts = [random_matrix(kind, 2 + i, 80, group, each, seed=i) for i, each in enumerate(zeros)]
    assert torch.equal(stack(parts).decode(), torch.cat([part.decode() for part in parts]))


@pytest.mark.parametrize("kind", ["i8", "u4", "f8e4m3"])
def test_rows_that_follow_each_other_in_memory_are_not_copied(kind):
    whole = random_matrix(kind, 6, 80, 16)
    parts = [whole.rows(slice(start, start + 2)) for start in (0, 2, 4)]
    joined = stack(parts)
    assert joined.codes.data_ptr() == whole.codes.data_ptr()
    assert torch.equal(joined.decode(), whole.decode())
    for others in (parts[::-1], parts[::2]):
        copied = stack(others)
        assert copied.codes.untyped_storage().data_ptr() != whole.codes.untyped_storage().data_ptr()
        assert torch.equal(copied.decode(), torch.cat([part.decode() for part in others]))


@pytest.mark.parametrize("other", [("i4", 16, False), ("u4", 8, False), ("u4", 16, True)])
def test_matrices_of_other_kinds_are_not_stacked(other):
    kind, group, ordered = other
    first, second = random_matrix("u4", 2, 80, 16), random_matrix(kind, 2, 80, group, ordered=ordered)
    assert stack([first, second]) is None
