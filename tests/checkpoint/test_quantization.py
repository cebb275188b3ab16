import json

import pytest

from sluice.checkpoint.quantization import FILES, Quantization, QuantizationError, read_quantization

CT = "compressed-tensors"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, Quantization("awq")),
        ({"quant_method": "gptq", "bits": 3}, Quantization("gptq", 1)),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, Quantization("gptq")),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, Quantization("fp8", block=(64, 32))),
        ({"quant_method": "fbgemm_fp8"}, Quantization("fp8")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Quantization("modelopt")),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Quantization("bitsandbytes")),
        (
            {
                "quant_method": CT,
                "format": "pack-quantized",
                "config_groups": {
                    "a": {"weights": {"num_bits": 8, "type": "int"}},
                    "b": {"weights": {"num_bits": 3}},
                    "c": {"weights": {"num_bits": 6, "type": "float"}},
                    "d": {"weights": {"num_bits": 16, "type": "int"}},
                },
            },
            Quantization(CT, bits=(3, 8)),
        ),
        (
            {
                "quant_method": CT,
                "format": "mixed-precision",
                "config_groups": {
                    "group_0": {"format": "float-quantized", "weights": {"block_structure": [128, 64]}},
                    "group_1": {"format": "pack-quantized", "weights": {"group_size": 128}},
                },
                "transform_config": {},
                "sparsity_config": {"format": "dense"},
            },
            Quantization(CT, block=(128, 64), groups=(128,)),
        ),
    ],
)
def test_options_that_tensors_leave_open(tmp_path, entry, expected):
    assert read_quantization(tmp_path, {"quantization_config": entry}) == expected
    assert read_quantization(tmp_path, {"compression_config": entry}) == expected


def test_a_plain_checkpoint(tmp_path):
    assert read_quantization(tmp_path, {"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method = 'aqlm' is not supported; awq, gptq, "),
        ({"quant_method": "auto-round"}, "quant_method = 'auto-round' is not supported"),
        ({}, "quant_method = None is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv' is not supported; AWQ of version gemm is"),
        ({"quant_method": "awq", "bits": 3}, "bits = 3 is not supported"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend = 'llm-awq' is not supported"),
        ({"quant_method": "gptq", "bits": 5}, "bits = 5 is not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format = True is not supported"),
        ({"quant_method": CT, "format": "marlin-24"}, "format = 'marlin-24' is not supported"),
        ({"quant_method": CT, "config_groups": {"a": {"format": "x"}}}, "format = 'x' is not supported"),
        (
            {"quant_method": CT, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format = 'sparse-24",
        ),
        ({"quant_method": CT, "transform_config": {"config_groups": {"u": {}}}}, "transform_config = '…' is not supp"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [[128], 128]}, "weight_block_size must be two positive integers"),
        (
            {
                "quant_method": CT,
                "config_groups": {str(side): {"weights": {"block_structure": [side, side]}} for side in (64, 128)},
            },
            "block_structure must be two positive integers, the same in all groups",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ' is not supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type = 'fp4' is not supported"),
        ("int4", "quantization_config must be an object (got str)"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, entry, message):
    with pytest.raises(QuantizationError) as caught:
        read_quantization(tmp_path, {"quantization_config": entry})
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: quantization_config")


@pytest.mark.parametrize("name", FILES)
def test_files_of_older_versions(tmp_path, name):
    (tmp_path / name).write_text("{}")
    found = read_quantization(tmp_path, {})
    assert found is not None
    assert found.method == FILES[name]
    (tmp_path / name).write_text("[")
    with pytest.raises(QuantizationError, match=f"{name} is not JSON"):
        read_quantization(tmp_path, {})


def test_the_options_of_these_files_are_read(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    with pytest.raises(QuantizationError, match=r"hf_quant_config\.json: quant_algo = 'W4A16_AWQ' is not supported"):
        read_quantization(tmp_path, {})
