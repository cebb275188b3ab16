"""Which backend the settings select, and which settings contradict each other. OpenVINO need not be installed."""

import shutil
import sys

import pytest

from engine_worker.backend import check_openvino, check_servable, load_runner, requires_openvino
from engine_worker.runner.config import DraftConfig, RunnerConfig
from sluice import tiny_model
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings import engine as settings


def config(**options: object) -> RunnerConfig:
    return RunnerConfig("cpu", **{"kv_cache_tokens": 64, "threads": 1} | options)


def load(**options: object):
    return load_runner(open_checkpoint(str(tiny_model.path())), config(**options), *[lambda *_: None] * 3)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({}, None),
        ({"backend": "torch"}, None),
        ({"backend": "openvino"}, "backend = openvino"),
        ({"quantize": "int8"}, "quantize = int8"),
        ({"weights_folder": "/var/tmp"}, "weights_folder = /var/tmp"),
        ({"kv_precision": "u8"}, "kv_precision = u8"),
        ({"dtype": "bfloat16"}, "dtype = bfloat16"),
        ({"dtype": "bfloat16", "backend": "torch"}, None),
        ({"backend": "openvino", "quantize": "int8"}, "backend = openvino"),
    ],
)
def test_settings_that_require_openvino(options, setting):
    assert requires_openvino(config(**options)) == setting


@pytest.mark.parametrize(
    ("quantize", "device", "setting"),
    [
        ("int8", "cuda", None),
        ("int4", "auto", "quantize = int4"),
        ("fp8", "cuda", None),
        ("fp8", "auto", None),
    ],
)
def test_on_a_gpu_quantized_products_are_our_own(quantize, device, setting):
    assert settings.requires_openvino(config(quantize=quantize), device) == setting


def test_fp8_needs_a_gpu():
    with pytest.raises(ValueError, match="quantize = fp8 needs a GPU"):
        requires_openvino(config(quantize="fp8"))
    with pytest.raises(ValueError, match="quantize = fp8 contradicts backend = openvino: OpenVINO has int8 and int4"):
        check_openvino(config(quantize="fp8"), "backend = openvino")


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"kv_precision": "float16"}, {"weights_folder": "tmp"}])
def test_settings_that_torch_does_not_support(options):
    with pytest.raises(ValueError, match=r"\w+ = \w+ needs backend = openvino, not torch"):
        load(backend="torch", **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tokens_per_block": 16}, "tokens_per_block = 16 contradicts .*: OpenVINO has blocks of 32 tokens"),
        ({"dtype": "float16"}, "dtype = float16 contradicts .*: OpenVINO computes in float32 or bfloat16"),
        ({"kv_precision": "bfloat16"}, "kv_precision = bfloat16 contradicts dtype = float32: use float32 or float16 "),
        ({"dtype": "bfloat16", "kv_precision": "float16"}, "kv_precision = float16 contradicts dtype = bfloat16: "),
        ({"attention": "reference"}, "attention = reference contradicts .*: OpenVINO has its own attention"),
    ],
)
def test_settings_that_openvino_does_not_support(options, error):
    with pytest.raises(ValueError, match=error):
        load(backend="openvino", **options)


def test_openvino_runs_in_one_process():
    with pytest.raises(ValueError, match=r"tensor_parallel = 2 contradicts quantize = int8: .* one process"):
        check_openvino(config(quantize="int8"), "quantize = int8", ranks=2)


def test_without_the_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "engine_worker.openvino.load", raising=False)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ValueError, match="cannot be used: the package openvino is not installed"):
        load(backend="openvino")
    assert load().choices["backend_reason"].startswith("the package openvino is not installed (")


def test_the_reason_for_torch():
    assert load(tokens_per_block=16).choices["backend_reason"] == (
        "tokens_per_block = 16; OpenVINO has blocks of 32 tokens"
    )
    assert load(backend="torch").choices["backend_reason"] == "selected by the setting"


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_blocks_hold_the_keys_and_values_of_both_models(backend):
    """The draft model is the same as the model, so each uses half of the memory."""
    checkpoint = open_checkpoint(str(tiny_model.path()))
    fraction = {"kv_cache_tokens": None, "kv_memory_fraction": 2e-3, "backend": backend}
    ignore = [lambda *_: None] * 3
    alone = load_runner(checkpoint, config(**fraction), *ignore)
    both = load_runner(checkpoint, config(**fraction), *ignore, DraftConfig(checkpoint, 8))
    assert (alone.draft_context, both.draft_context) == (None, checkpoint.max_context_tokens)
    assert both.choices["draft_model"] == checkpoint.name
    # Other processes may use some of the free memory between the two loads.
    assert both.num_blocks == pytest.approx(alone.num_blocks / 2, rel=0.2)


def test_a_draft_model_must_fit(tmp_path):
    folder = shutil.copytree(tiny_model.path(), tmp_path / "other")
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"vocab_size": 4096', '"vocab_size": 4095'))
    with pytest.raises(CheckpointError, match="vocab_size must be 4096"):
        check_servable(open_checkpoint(str(tiny_model.path())), config(), draft=open_checkpoint(str(folder)))
