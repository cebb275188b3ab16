"""Models and settings that an engine refuses before it reads or downloads weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine_worker.__main__ import with_weights
from engine_worker.backend import check_servable
from engine_worker.runner import memory
from engine_worker.runner.config import RunnerConfig
from sluice import tiny_model
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.fields import section_of
from sluice.settings.read import load_settings
from sluice.settings.services import EngineSettings


@pytest.fixture
def folder(tmp_path) -> Path:
    """The bundled model without its weights."""
    without = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(tiny_model.path(), tmp_path / "model", ignore=without))


def change_config(folder: Path, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def check(folder: Path, ranks: int = 1, **options) -> None:
    defaults = {"device": "cpu", "kv_cache_tokens": 64, "threads": 1}
    check_servable(open_checkpoint(str(folder)), RunnerConfig(**defaults | options), ranks)


def test_the_check_needs_no_weights(folder):
    check(folder)
    check(folder, quantize="int8", dtype="float32")
    check(folder, ranks=2)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, {}, "architecture FooForCausalLM is not supported"),
        ({"quantization_config": {"quant_method": "aqlm"}}, {}, "quantization_config.quant_method = 'aqlm' is not"),
        ({"num_key_value_heads": 3}, {}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ({"head_dim": 63}, {}, "head_dim = 63 must be even"),
        ({"layer_types": ["full_attention"]}, {}, "layer_types has 1 entries for 6 layers"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers must be an integer from 1 to 4096 (got 0)"),
        ({"max_position_embeddings": 0}, {}, "max_position_embeddings must be an integer from 2 to 2147483647 (got 0)"),
        ({}, {"ranks": 3}, "tensor_parallel = 3 does not divide num_attention_heads = 4"),
        ({"intermediate_size": 1001}, {"ranks": 2}, "tensor_parallel = 2 does not divide intermediate_size = 1001"),
        ({}, {"dtype": "float16"}, "dtype = float16 is slower than float32 on a CPU"),
        (
            {"hidden_size": 255, "head_dim": 64},
            {"quantize": "int4"},
            "quantize = int4 needs an even hidden_size (that of model is 255)",
        ),
        ({}, {"output_layers": (9,)}, "output_layers: the model has no layer 9; its last layer is 5"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1.0}}, {"quantize": "int8"}, "rope type 'foo'"),
        ({"vocab_size": 1 << 24, "hidden_size": 1 << 20}, {}, "the model's weights take "),
        ({}, {"kv_cache_tokens": 1 << 40}, "kv_cache_tokens = 1099511627776 "),
    ],
)
def test_what_cannot_be_served_is_refused_without_weights(folder, config, options, message):
    change_config(folder, **config)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
        check(folder, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not"):
        check(folder)


def test_no_weights_of_an_unsupported_model_are_downloaded(folder, monkeypatch):
    downloads = []

    def download(model, **options):
        downloads.append("*.safetensors" in options["allow_patterns"])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings = load_settings(
        EngineSettings, ["--model", "someone/model", "--device", "cpu", "--listen", "ipc:///tmp/e"]
    )
    checkpoint, config = open_checkpoint(settings.model, weights=False), section_of(settings, RunnerConfig)
    assert with_weights(settings, checkpoint, config) == (checkpoint, None)
    assert downloads == [False, True]
    change_config(folder, architectures=["FooForCausalLM"])
    with pytest.raises(CheckpointError, match="FooForCausalLM"):
        with_weights(settings, open_checkpoint(settings.model, weights=False), config)
    assert downloads == [False, True, False]


def test_a_limit_above_the_context_is_refused(folder):
    flags = ["--model", str(folder), "--max-context-tokens", "4096"]
    settings, checkpoint = load_settings(EngineSettings, flags), open_checkpoint(str(folder))
    with pytest.raises(ValueError, match=r"max_context_tokens must be at most the model's context, 2048 \(got 4096\)"):
        with_weights(settings, checkpoint, section_of(settings, RunnerConfig))


def test_the_memory_of_a_container_is_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    whole = memory.total_memory(torch.device("cpu"))
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total_memory(torch.device("cpu")) == whole
    (tmp_path / "memory.max").write_text("4096\n")
    assert memory.total_memory(torch.device("cpu")) == 4096
