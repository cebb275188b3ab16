"""Checkpoints written by compressed-tensors mean what that library reads in them."""

import json

import pytest
import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from safetensors.torch import save_file
from torch import nn

from engine_worker.formats.source import Files, find_weights
from sluice.checkpoint.quantization import PACKED_FORMATS, QuantizationError, read_quantization
from tests.engine_worker.formats.compressed import compress

PRESETS = sorted(PRESET_SCHEMES.keys() - {"UNQUANTIZED"})


def integers(bits: int, form: str = "pack-quantized", **options: object) -> dict:
    return {"format": form, "weights": {"num_bits": bits, "type": "int", **options}}


def floats(form: str = "float-quantized", **options: object) -> dict:
    return {"format": form, "weights": {"num_bits": 8, "type": "float", **options}}


GROUPS = {"strategy": "group", "group_size": 8}
BLOCKS = {"strategy": "block", "block_structure": [16, 26]}
SCHEMES = {
    **{f"{bits} bits, groups": integers(bits, symmetric=False, **GROUPS) for bits in range(1, 9)},
    **{f"{bits} bits, rows": integers(bits, symmetric=False, strategy="channel") for bits in range(1, 9)},
    "4 bits, symmetric rows": integers(4, strategy="channel"),
    "4 bits, act-order of the weights": integers(4, actorder="weight", **GROUPS),
    "4 bits, matrix": integers(4, strategy="tensor"),
    "5 bits, matrix with a zero point": integers(5, strategy="tensor", symmetric=False),
    "4 bits, blocks with zero points": integers(4, symmetric=False, **BLOCKS),
    "int8, rows with zero points": integers(8, "int-quantized", strategy="channel", symmetric=False),
    "int8, blocks with zero points": integers(
        8, "int-quantized", strategy="block", block_structure=[16, 26], symmetric=False
    ),
    "int8, groups": integers(8, "int-quantized", **GROUPS),
    "int8, matrix": integers(8, "naive-quantized", strategy="tensor"),
    "4 bits as int8": integers(4, "int-quantized", symmetric=False, **GROUPS),
    "FP8, matrix": floats(strategy="tensor"),
    "FP8, matrix, naive": floats("naive-quantized", strategy="tensor"),
    "FP8, groups": floats(**GROUPS),
    "FP8, blocks": floats(**BLOCKS),
}


def compare(folder, shape: tuple[int, int], scheme: QuantizationScheme, dtype: torch.dtype) -> None:
    """What is read from a matrix is what the library reads, bit for bit once it is rounded to the type of its result:
    it multiplies in that type, and its operands have few enough bits that float32 adds no rounding of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], dtype=dtype))
    original = model[0].weight.detach().clone()
    compressor = compress(model, folder, QuantizationConfig(config_groups={"group_0": scheme}))
    save_file(model.state_dict(), folder / "model.safetensors")
    compressor.decompress_model(model)
    expected = model[0].weight.detach()
    quantization = read_quantization(folder, json.loads((folder / "config.json").read_text()))
    with Files("cpu") as files:
        found = files.stored("0.weight", find_weights(folder)["0.weight"], shape, quantization).decode()
    assert torch.equal(found.to(expected.dtype), expected)
    assert 0 < (expected - original).abs().max() < 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_presets(tmp_path, name):
    compare(tmp_path, (24, 256), preset_name_to_scheme(name, ["Linear"]), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(tmp_path, name, dtype):
    """In rows of 104 codes, and columns of 37 zero points, most sizes of codes end within a word."""
    compare(tmp_path, (37, 104), QuantizationScheme(targets=["Linear"], **SCHEMES[name]), dtype)


@pytest.mark.parametrize("form", [each.value for each in CompressionFormat])
def test_every_format_of_the_library_is_read_or_refused_by_name(tmp_path, form):
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": form}}
    if form in PACKED_FORMATS:
        assert read_quantization(tmp_path, config) is not None
    else:
        with pytest.raises(QuantizationError, match=f"format = '{form}' is not supported"):
            read_quantization(tmp_path, config)
