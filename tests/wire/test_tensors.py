"""Rows of tensors: slices, bounded parts, and invalid messages."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.tensors import MAX_NAMES, PART_BYTES, TensorBatch, TensorParams, TensorRows
from tests.fakes.tensors import first_values, tensor_rows


@given(start=st.integers(0, 50), count=st.integers(1, 50), cuts=st.data())
def test_between(start, count, cuts):
    rows = tensor_rows(start, start + count)
    first = cuts.draw(st.integers(start, start + count - 1))
    end = cuts.draw(st.integers(first + 1, start + count))
    part = rows.between(first, end)
    assert (part.start, part.end, part.rows) == (first, end, end - first)
    assert first_values([part]) == list(range(first, end))


@given(rows=st.integers(1, 300), width=st.sampled_from([1, 1000, 5000, PART_BYTES // 4, PART_BYTES]))
def test_parts_are_bounded_and_join_to_the_whole(rows, width):
    rows = min(rows, 40_000_000 // width // 4)
    whole = tensor_rows(3, 3 + max(1, rows), width=width)
    parts = list(whole.parts())
    assert first_values(parts) == list(range(3, whole.end))
    assert all(len(part.data) <= PART_BYTES or part.rows == 1 for part in parts)
    assert len(parts) <= -(-len(whole.data) // PART_BYTES) * 2


def test_a_message_survives_a_round_trip():
    batch = TensorBatch("engine", 7, [tensor_rows(0, 3), tensor_rows(5, 6, "context_logits", context=True)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=TensorBatch) == batch


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ([2, 3], "float32", 20),
        ([2, 3], "float32", 28),
        ([0, 3], "float32", 0),
        ([], "float32", 4),
        ([1] * 9, "float32", 4),
        ([-1, -1], "float32", 4),
        ([1], "float64", 8),
        ([1 << 40, 1 << 40], "uint8", 1),
    ],
)
def test_invalid_sizes_are_refused(shape, dtype, size):
    message = msgspec.msgpack.encode([1, 0, 0, "t", False, 0, shape, dtype, bytes(size)])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(message, type=TensorRows)


def test_the_number_of_tensors_in_a_request_is_limited():
    names = {"output": ["t"] * (MAX_NAMES + 2)}
    assert msgspec.convert(names, TensorParams)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"output": ["t"] * (MAX_NAMES + 3)}, TensorParams)


def test_params_without_tensors_are_false():
    assert not TensorParams(context_rows=3, output_rows={0: 1})
    assert TensorParams(("context_logits",))
