import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_worker.formats.bitsandbytes import STATE
from engine_worker.formats.packing import WORD_BITS, pack_pairs, unpack_pairs, unpack_words
from engine_worker.formats.readers import read
from engine_worker.formats.stored import Stored
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.quantization import Quantization, read_quantization
from tests.engine_worker.formats.packed import FORMATS, VARIANTS, awq, gptq, pack_config, pack_quantized

SHAPE = 40, 96
ALL = FORMATS | VARIANTS
OPTIONAL = ("weight_zero_point", "weight_g_idx")
"""Parts without which a matrix means something else."""


def matrix(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def quantization(config: dict, folder) -> Quantization:
    found = read_quantization(folder, {"quantization_config": config})
    assert found is not None
    return found


@pytest.mark.parametrize("name", ALL)
def test_matrices_mean_what_their_format_says(name, tmp_path):
    pack, config = ALL[name]
    packed = pack(matrix())
    stored = read(packed.parts, SHAPE, quantization(config, tmp_path))
    assert stored.shape == SHAPE
    torch.testing.assert_close(stored.decode(), packed.dense, atol=0, rtol=0)
    # The matrix was quantized, rather than lost.
    assert 0 < (packed.dense - matrix()).abs().max() < 2


@pytest.mark.parametrize("name", FORMATS)
def test_rows_commute_with_decoding(name, tmp_path):
    pack, config = FORMATS[name]
    stored = read(pack(matrix()).parts, SHAPE, quantization(config, tmp_path))
    for index in (slice(8, 24), torch.tensor([3, 0, 39, 3])):
        assert torch.equal(stored.rows(index).decode(), stored.decode()[index])


def test_zeros_in_the_middle_become_signed_codes():
    symmetric, asymmetric = (
        read(gptq(matrix(), symmetric=each).parts, SHAPE, Quantization("gptq", 1)) for each in (True, False)
    )
    assert (symmetric.type, symmetric.zeros) == ("i4", None)
    assert asymmetric.type == "u4"


def test_a_zero_point_of_sixteen():
    """The first version of GPTQ's format stores 15 for it."""
    parts = gptq(matrix()).parts
    parts["qzeros"] = torch.full_like(parts["qzeros"], -1)
    stored = read(parts, SHAPE, Quantization("gptq", 1))
    assert stored.zeros is not None
    assert torch.equal(stored.zeros, torch.full_like(stored.zeros, 16.0))


def test_words_of_another_method_are_refused():
    with pytest.raises(CheckpointError, match="has a qweight, but its quant_method is 'fp8'"):
        read(gptq(matrix()).parts, SHAPE, Quantization("fp8"))


def test_pairs():
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)
    assert pack_pairs(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert pack_pairs(torch.tensor([-8, 7, 1, -1], dtype=torch.int8)).tolist() == [0x78, 0xF1]
    signed = Stored("i4", pack_pairs(torch.tensor([[-8, -1, 0, 7]])), torch.ones(1, 1), None, 4)
    assert signed.decode().tolist() == [[-8.0, -1.0, 0.0, 7.0]]


@pytest.mark.parametrize("name", ALL)
def test_damaged_matrices_are_refused(name, tmp_path):
    """Without each of the parts, and with a part of another size, no matrix is read wrongly."""
    pack, config = ALL[name]
    whole, found = pack(matrix()), quantization(config, tmp_path)
    expected = read(whole.parts, SHAPE, found).decode()
    for part in whole.parts:
        without = {key: value for key, value in whole.parts.items() if key != part}
        cut = whole.parts | {part: whole.parts[part][..., :-1]} if whole.parts[part].dim() else without
        if "padded" in name and part == "weight_packed":
            cut = without  # In a matrix as small as this, one word fewer may be as many as without padding.
        for parts in (cut,) if part in OPTIONAL else (without, cut):
            try:
                same = torch.equal(read(parts, SHAPE, found).decode(), expected)
            except CheckpointError:
                continue
            assert same, (name, part)


@pytest.mark.parametrize(
    ("inputs", "bits", "packed", "message"),
    [
        (64, (3,), 4, "has 8 words for 64 inputs, which may be of no known size"),
        (40, (3,), 3, "has 4 words for 40 inputs, which may be 3 bits or 3 bits, padded"),
        (64, (7, 8), 8, "has 16 words for 64 inputs, which may be 7 bits, padded or 8 bits"),
        (64, (), 8, "has 16 words for 64 inputs, which may be 7 bits, padded or 8 bits"),
    ],
)
def test_words_that_may_be_of_several_sizes_are_refused(inputs, bits, packed, message):
    values = matrix()[:, :inputs]
    parts = pack_quantized(values, group=8, bits=packed).parts
    with pytest.raises(CheckpointError, match=message):
        read(parts, (len(values), inputs), Quantization("compressed-tensors", bits=bits))


OTHER_FORMS = {
    "of another type": lambda part: part.to(torch.float32 if part.dtype in (torch.int8, torch.int32) else torch.int64),
    "of a smaller type": lambda part: part.float().to(torch.int16),
    "without dimensions": lambda part: part.flatten()[0],
    "in one dimension": lambda part: part.flatten(),
    "in three dimensions": lambda part: part.unsqueeze(0),
    "empty": lambda part: part.reshape(-1)[:0],
    "without columns": lambda part: part[..., :0] if part.dim() else part,
    "with a row fewer": lambda part: part[:-1] if part.dim() else part,
    "with a row more": lambda part: part[[*range(len(part)), 0]] if part.dim() else part,
}


@pytest.mark.parametrize("form", OTHER_FORMS)
@pytest.mark.parametrize("name", ALL)
def test_parts_in_another_form_are_refused(name, form, tmp_path):
    """By an error of ours, not of torch, unless the matrix is the same."""
    pack, config = ALL[name]
    whole, found = pack(matrix()), quantization(config, tmp_path)
    expected = read(whole.parts, SHAPE, found).decode()
    for part, tensor in whole.parts.items():
        if form == "without dimensions" and part in ("weight_scale", "weight_scale_inv"):
            continue  # A scale of the whole matrix.
        try:
            decoded = read(whole.parts | {part: OTHER_FORMS[form](tensor)}, SHAPE, found).decode()
        except CheckpointError:
            continue
        assert torch.equal(decoded, expected), part


@pytest.mark.parametrize(
    ("name", "part", "form", "message"),
    [
        ("AWQ", "qzeros", "of another type", "has a qzeros of type torch.float32, must be torch.int32"),
        ("AWQ", "scales", "in one dimension", r"has a scales of shape \[240\], must have two dimensions"),
        ("GPTQ", "qzeros", "without columns", r"has a qzeros of shape \[6, 0\], must have two dimensions"),
        ("GPTQ", "scales", "with a row fewer", r"has scales of shape \[5, 40\], which do not fit 96 x 40 codes"),
        ("compressed-tensors, NVFP4", "weight_global_scale", "empty", r"scale of shape \[0\], must be one number"),
        ("bitsandbytes, nf4, nested", "weight.absmax", "of a smaller type", "absmax of type torch.int16, must be"),
    ],
)
def test_the_part_and_its_form_are_named(name, part, form, message, tmp_path):
    pack, config = ALL[name]
    parts = pack(matrix()).parts
    with pytest.raises(CheckpointError, match=message):
        read(parts | {part: OTHER_FORMS[form](parts[part])}, SHAPE, quantization(config, tmp_path))


@pytest.mark.parametrize(("pack", "method"), [(awq, "awq"), (pack_quantized, "compressed-tensors")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_an_odd_number_of_inputs(pack, method, symmetric):
    """Codes of 4 bits are bytes then."""
    options = {"symmetric": symmetric} if pack is pack_quantized else {}
    packed = pack(matrix()[:, :45], group=15, **options)
    stored = read(packed.parts, (SHAPE[0], 45), Quantization(method, bits=(4,)))
    assert stored.type == ("i8" if options.get("symmetric") else "u8")
    assert torch.equal(stored.decode(), packed.dense)
    assert stored.codes.shape == stored.shape == (SHAPE[0], 45)


def test_blocks_of_an_odd_number_of_inputs():
    parts = FORMATS["bitsandbytes, nf4"].pack(torch.randn(32, 3)).parts
    state = json.loads(bytes(parts[STATE].tolist())) | {"blocksize": 3}
    parts[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="has 3 inputs, must be a multiple of its blocks of 3, and even"):
        read(parts, (32, 3), Quantization("bitsandbytes"))


@pytest.mark.parametrize("size", [64, 48])
def test_groups_that_do_not_divide_the_inputs(size):
    """Of 96 inputs, groups of 64 would be 64 and 32, and not twice 48."""
    config = pack_config(4)
    config["config_groups"]["group_0"]["weights"]["group_size"] = size
    parts, found = pack_quantized(matrix(), group=48).parts, quantization(config, Path())
    if size == 48:
        assert read(parts, SHAPE, found).group == size
        return
    with pytest.raises(CheckpointError, match=r"scale of shape \[40, 2\], so groups of 48 of its 96 inputs, but .* 64"):
        read(parts, SHAPE, found)


class Largest(TorchDispatchMode):
    """The largest tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, result.nbytes)
        return result


@pytest.mark.parametrize("bits", [3, 4])
def test_a_large_matrix_is_unpacked_in_little_memory(bits):
    """At no time are all numbers in words of their own."""
    count = 8 * 3072 * WORD_BITS // bits
    with Largest() as largest:
        unpack_words(torch.zeros(8, 3072, dtype=torch.int32), bits, count // 8)
    assert largest.nbytes == count
