"""Checkpoints written by compressed-tensors mean what that library reads in them."""

import json

import pytest
import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from compressed_tensors.utils.match import is_match, match_named_modules
from safetensors.torch import save_file
from torch import nn

from engine_worker.formats.source import Files, find_weights
from engine_worker.layers.shard import UNSHARDED
from sluice.checkpoint.quantization import PACKED_FORMATS, QuantizationError, read_quantization
from tests.engine_worker.formats.checkpoints import change_config
from tests.engine_worker.formats.compressed import compress, write_pair
from tests.engine_worker.formats.test_checkpoints import first_token, weights
from tests.engine_worker.models.loading import Rank

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


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


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
    quantization = read_quantization(folder, {"quantization_config": config_of(folder)})
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


LISTS = {
    "the head is excluded": (["Linear"], ["lm_head"]),
    "projections by name and pattern": (["Linear"], ["lm_head", "re:.*v_proj", "model.layers.1.mlp.down_proj"]),
    "a layer": (["Linear", "Embedding"], ["re:.*layers\\.0\\."]),
    "targets by pattern and name": (["re:.*self_attn\\.[qk]_proj$", "model.layers.0.mlp.up_proj"], []),
    "a pattern matches from the beginning": (["Linear"], ["re:self_attn", "re:model.*self_attn", "down_proj"]),
}


def quantized_modules(folder) -> set[str]:
    return {name.removesuffix(".weight") for name, weight in find_weights(folder).items() if weight.whole is None}


@pytest.mark.parametrize("name", LISTS)
def test_the_matrices_that_the_library_excludes_are_plain(tmp_path, name):
    targets, ignore = LISTS[name]
    scheme = QuantizationScheme(targets=targets, **integers(4, symmetric=False, **GROUPS))
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore)
    quantized, dense, model = write_pair(tmp_path, "llama", config)
    matched = {name for name, module in match_named_modules(model, targets, ignore) if hasattr(module, "weight")}
    assert quantized_modules(quantized) == matched
    expected = weights(dense, UNSHARDED)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(quantized, UNSHARDED).items())


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_lists_with_names_of_fused_modules_mean_their_parts(tmp_path):
    """As in lists written for engines that fuse projections. Ours does not read them: it finds the same in the
    tensors."""
    ignore = [
        "lm_head",
        "re:.*1.self_attn.[qkv]_proj",
        *(f"model.layers.0.mlp.{part}" for part in FUSED["gate_up_proj"]),
    ]
    scheme = QuantizationScheme(targets=["Linear"], **integers(4, **GROUPS))
    quantized, dense, model = write_pair(
        tmp_path, "llama", QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore)
    )
    found = quantized_modules(quantized)
    for name, parent in model.named_modules():
        for fused, parts in FUSED.items():
            if hasattr(parent, parts[0]):
                is_quantized = is_match(f"{name}.{fused}", nn.Linear(1, 1), ["Linear"], ignore, fused=FUSED)
                assert {f"{name}.{part}" in found for part in parts} == {is_quantized}
    change_config(quantized, {"quantization_config": config_of(quantized) | {"ignore": ["re:.*qkv_proj", "re:.*mlp"]}})
    expected = weights(dense, UNSHARDED)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(quantized, UNSHARDED).items())


def test_matrices_of_several_schemes(tmp_path):
    """Queries and keys have zero points, values have not: the three are one product. Scales and zero points of
    activations and cache are not used."""
    activations = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}
    groups = {
        "queries": QuantizationScheme(targets=["re:.*[qk]_proj"], **integers(4, symmetric=False, **GROUPS)),
        "values": QuantizationScheme(
            targets=["re:.*[vo]_proj"], **integers(8, strategy="channel"), input_activations=activations
        ),
        "mlp": preset_name_to_scheme("FP8", ["re:.*(gate|up)_proj"]),
        "down": preset_name_to_scheme("MXFP4", ["re:.*down_proj"]),
        "vocabulary": QuantizationScheme(targets=["lm_head", "Embedding"], **integers(6, strategy="channel")),
    }
    kv_cache = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}
    quantized, dense, _ = write_pair(
        tmp_path, "qwen3, biased", QuantizationConfig(config_groups=groups, kv_cache_scheme=kv_cache)
    )
    assert config_of(quantized)["format"] == "mixed-precision"
    for shard in (UNSHARDED, Rank(1)):
        expected = weights(dense, shard)
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(quantized, shard).items())
    token = first_token(dense, "torch")
    assert first_token(quantized, "torch") == token
    found = first_token(quantized, "openvino", quantized_activations=False)
    assert found.token == token.token
    assert found.logprob.logprob == pytest.approx(token.logprob.logprob, abs=1e-4)


def test_a_table_for_embedding_and_head(tmp_path):
    scheme = QuantizationScheme(targets=["Embedding"], **integers(5, symmetric=False, **GROUPS))
    quantized, dense, _ = write_pair(
        tmp_path, "qwen2, tied", QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    )
    assert quantized_modules(quantized) == {"model.embed_tokens"}
    expected = first_token(dense, "torch")
    assert first_token(quantized, "torch") == expected
    found = first_token(quantized, "openvino", quantized_activations=False)
    assert found.token == expected.token
    assert found.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=1e-4)
