import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from sluice.checkpoint.tensor_file import LENGTH_BYTES, TensorFileError, decode, split

LIMIT = 1 << 12


class Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@pytest.mark.parametrize("as_view", [False, True])
def test_a_file_written_by_safetensors_is_read(as_view):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}
    data = save(tensors, metadata={"format": "pt"})
    entries, start = split(memoryview(data) if as_view else data, LIMIT)
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = decode(entries[name], Entry)
        begin, end = entry.data_offsets
        assert entry.shape == list(tensor.shape)
        assert data[start + begin : start + end] == tensor.tobytes()


def test_the_size_of_the_header_is_limited():
    data = save({"a": np.zeros(1, np.float32)})
    size = int.from_bytes(data[:LENGTH_BYTES], "little")
    assert split(data, size).start == LENGTH_BYTES + size
    with pytest.raises(TensorFileError, match=f"its header has an invalid length, {size} bytes"):
        split(data, size - 1)
    with pytest.raises(TensorFileError, match="its header has an invalid length"):
        split(data[: LENGTH_BYTES + size - 1], LIMIT)


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda data: len(data).to_bytes(8, "little") + data))
def test_arbitrary_bytes_are_parsed_or_refused(data):
    message = ""
    try:
        start = split(data, LIMIT).start
    except TensorFileError as error:
        message = str(error)
    if message:
        assert message.startswith("is not a safetensors file: ")
    else:
        assert LENGTH_BYTES <= start <= len(data)


def test_a_header_in_a_header():
    data = b"[" * LIMIT
    with pytest.raises(TensorFileError):
        split(len(data).to_bytes(8, "little") + data, LIMIT)
    with pytest.raises(TensorFileError, match="is not a safetensors file"):
        decode(b'{"dtype": 3}', Entry)
