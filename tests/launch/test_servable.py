"""Checkpoints that the launcher refuses before it starts any service."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine_worker.models.registry import MODELS
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.servable import causal_language_models
from sluice.launch import Ring
from sluice.tiny_model import path


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(path(), tmp_path / "model"))


def refusal(folder: Path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        Ring(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_the_bundled_model_is_servable(folder) -> None:
    Ring(folder)


def test_the_draft_model_is_checked_before_anything_starts(folder) -> None:
    Ring(folder, engine_args={"draft_model": str(folder)})
    change_config(folder, vocab_size=5000)
    with pytest.raises(CheckpointError, match="draft_model model: vocab_size must be 4096"):
        Ring(path(), engine_args={"draft_model": str(folder)})


def test_architectures_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    architectures = {name for names in NAMES.values() for name in ([names] if isinstance(names, str) else names)}
    assert causal_language_models() == architectures
    assert MODELS.keys() <= architectures


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "FooForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.quant_method = 'aqlm' is not"),
        ({"compression_config": {"format": "pack-quantized"}}, "compression_config.quant_method = None"),
        ({"max_position_embeddings": 1}, "max_position_embeddings must be an integer from 2 to 2147483647 (got 1)"),
        (
            {"max_position_embeddings": "8k"},
            "max_position_embeddings must be an integer from 2 to 2147483647 (got '8k')",
        ),
    ],
)
def test_an_unsupported_model_is_refused(folder, config, named) -> None:
    change_config(folder, **config)
    assert named in refusal(folder)


def test_no_weights_of_an_unsupported_model_are_downloaded(folder, monkeypatch) -> None:
    patterns: list[str] = []

    def download(model: str, **options) -> str:
        patterns.extend(options["allow_patterns"])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    change_config(folder, architectures=["FooForCausalLM"])
    with pytest.raises(CheckpointError, match="FooForCausalLM"):
        Ring("someone/model")
    assert patterns
    assert "*.safetensors" not in patterns


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_files_of_unknown_quantization_are_refused(folder, name) -> None:
    (folder / name).write_text('{"quant_method": "aqlm"}')
    assert f"{name}: quant_method = 'aqlm' is not supported" in refusal(folder)


def test_truncated_weights_are_refused_unless_they_are_not_read(folder) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert str(weights) in refusal(folder)
    Ring(folder, engine_args={"weights": "random"})


def test_a_broken_tokenizer_is_refused(folder) -> None:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:999])
    assert str(tokenizer) in refusal(folder)


@pytest.mark.process
def test_torch_is_not_imported() -> None:
    code = "import sys; from sluice.launch import Ring; Ring(); print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
