import pytest
import torch

from engine_worker.formats.packing import pack_pairs, unpack_pairs
from engine_worker.formats.readers import read
from engine_worker.formats.stored import Stored
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.quantization import Quantization, read_quantization
from tests.engine_worker.formats.packed import FORMATS, VARIANTS, gptq, pack_quantized

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
