import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.gguf import GgufError, read_gguf, read_header
from sluice.checkpoint.weight_files import GGUF, check_weight_files
from tests.fakes.gguf_file import finish

KINDS = gguf.GGMLQuantizationType


def write(file, *, tensors=None, **fields):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("tokens", ["a", "ü", ""])
    writer.add_array("types", [1, 2, 3])
    writer.add_float32("eps", 0.5)
    writer.add_string("text", "long" * 100)
    for name, value in fields.items():
        writer.add_uint32(name.replace("_", "."), value)
    for name, (values, kind) in (tensors or {"a": (np.ones((4, 64), np.float32), KINDS.F32)}).items():
        writer.add_tensor(name, values, raw_dtype=kind)
    finish(writer)
    return file


def test_metadata_and_tensors(tmp_path):
    values = np.arange(256, dtype=np.float32).reshape(4, 64)
    quantized = gguf.quantize(values, KINDS.Q8_0)
    file = write(tmp_path / "a.gguf", tensors={"plain": (values, KINDS.F32), "small": (quantized, KINDS.Q8_0)})
    found = read_gguf(file)
    assert found.fields["general.architecture"] == "llama"
    assert (found.fields["tokens"], found.fields["types"], found.fields["eps"]) == (["a", "ü", ""], [1, 2, 3], 0.5)
    plain, small = found.tensors
    assert [plain[:3], small[:3]] == [("plain", "F32", (4, 64)), ("small", "Q8_0", (4, 64))]
    data = file.read_bytes()
    assert data[plain.start : plain.start + plain.num_bytes] == values.tobytes()
    assert data[small.start : small.start + small.num_bytes] == quantized.tobytes()
    assert data[found.header_bytes : plain.start].strip(b"\0") == b""


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is not a GGUF file"),
        (b"GGML" + bytes(20), "is not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "has version 1 of GGUF"),
        (b"GGUF" + (3).to_bytes(4, "little"), "ends within its header"),
    ],
)
def test_what_is_not_gguf_is_named(tmp_path, content, named):
    (tmp_path / GGUF).write_bytes(content)
    with pytest.raises(CheckpointError, match=named):
        check_weight_files(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    whole = write(tmp_path / "whole.gguf").read_bytes()
    for size, named in ((200, "ends within its header"), (len(whole) - 100, "ends within the tensor a")):
        (tmp_path / GGUF).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=named):
            check_weight_files(tmp_path)


def test_a_part_of_a_model_is_named(tmp_path):
    with pytest.raises(GgufError, match="is one of 3 parts"):
        read_gguf(write(tmp_path / "a.gguf", split_count=3))


@pytest.mark.parametrize(("kind", "size"), [("Q2_K", 84), ("IQ4_XS", 136), ("TQ1_0", 54)])
def test_types_that_are_not_supported_are_named(tmp_path, kind, size):
    blocks = np.zeros((2, size), np.uint8)
    file = write(tmp_path / "a.gguf", tensors={"blk.0.attn_q.weight": (blocks, KINDS[kind])})
    with pytest.raises(GgufError, match=rf"blk\.0\.attn_q\.weight of type {kind}.*use a file with .*Q4_K"):
        read_gguf(file)


@given(st.data())
def test_no_damage_goes_unnoticed_as_another_error(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    content = bytearray(write(file).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = read_gguf(file)
    except GgufError:
        return
    assert all(tensor.start + tensor.num_bytes <= len(content) for tensor in found.tensors)


def test_two_tensors_of_a_name_are_refused(tmp_path):
    file = write(tmp_path / "a.gguf", tensors={name: (np.ones((4, 64), np.float32), KINDS.F32) for name in "ab"})
    # The header has the names with their lengths, of eight bytes.
    changed = file.read_bytes().replace((1).to_bytes(8, "little") + b"b", (1).to_bytes(8, "little") + b"a")
    file.write_bytes(changed)
    with pytest.raises(GgufError, match="has 2 tensors of the name a"):
        read_gguf(file)


def test_a_tensor_without_values_is_refused(tmp_path):
    file = write(tmp_path / "a.gguf", tensors={"a": (np.ones((3, 5), np.float32), KINDS.F32)})
    sizes = (5).to_bytes(8, "little") + (3).to_bytes(8, "little")
    file.write_bytes(file.read_bytes().replace(sizes, sizes[:8] + bytes(8)))
    with pytest.raises(GgufError, match=r"has a tensor a of shape \[0, 5\], which has no values"):
        read_gguf(file)


def test_rows_that_are_no_blocks_are_refused(tmp_path):
    file = write(tmp_path / "a.gguf", tensors={"a": (np.ones((3, 64), np.float32), KINDS.F32)})
    sizes = (64).to_bytes(8, "little") + (3).to_bytes(8, "little")
    # The number of the type follows.
    changed = file.read_bytes().replace(sizes + bytes(4), (50).to_bytes(8, "little") + sizes[8:] + bytes([8, 0, 0, 0]))
    file.write_bytes(changed)
    with pytest.raises(GgufError, match="has a tensor a with rows of 50 values, but Q8_0 has 32"):
        read_gguf(file)


def test_the_header_has_no_tokenizer(tmp_path):
    file = write(tmp_path / "a.gguf", tokenizer_ggml_bos=1)
    whole, header = read_gguf(file), read_header(file)
    assert whole.fields["tokenizer.ggml.bos"] == 1
    assert header.fields == {name: value for name, value in whole.fields.items() if name != "tokenizer.ggml.bos"}
    assert header.tensors == whole.tensors
