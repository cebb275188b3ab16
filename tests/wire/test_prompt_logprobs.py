import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.prompt_logprobs import PART_ROWS, PromptLogprobs, parts, row_bytes, unpack


@given(rows=st.integers(1, 3 * PART_ROWS), top=st.integers(0, 3), start=st.integers(0, 9))
def test_parts_join_to_the_whole(rows, top, start):
    data = bytes(i % 251 for i in range(row_bytes(top))) * rows
    messages = list(parts(7, 1, start, top, data))
    assert b"".join(part.data for part in messages) == data
    assert [part.start for part in messages] == [
        start + sum(p.rows for p in messages[:i]) for i in range(len(messages))
    ]
    assert sum(1 for _ in unpack(data, top)) == rows


@pytest.mark.parametrize("size", [0, 7, 9, 12, row_bytes(0) * (PART_ROWS + 1)])
def test_invalid_sizes_are_refused(size):
    message = msgspec.msgpack.encode([1, 0, 0, 0, bytes(size)])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(message, type=PromptLogprobs)
