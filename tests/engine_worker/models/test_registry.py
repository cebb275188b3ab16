import subprocess
import sys

import pytest

from engine_worker.models.config import NotNativeError
from engine_worker.models.qwen3 import Qwen3Moe
from engine_worker.models.registry import find_model, model_class
from tests.engine_worker.models.checkpoints import CONFIGS


def test_a_native_class_is_preferred():
    raw = CONFIGS["qwen3 moe"].to_dict() | {"architectures": ["Strange", "Qwen3MoeForCausalLM"]}
    resolved = find_model(raw)
    assert resolved.architecture is Qwen3Moe
    assert resolved.choices == {"implementation": "sluice"}


def test_transformers_implements_what_the_native_class_does_not():
    raw = CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"}
    resolved = find_model(raw)
    assert resolved.choices == {
        "implementation": "transformers",
        "implementation_reason": "config.json: hidden_act = 'gelu' is not supported",
    }
    assert resolved.config.num_layers == 2


@pytest.mark.parametrize(
    ("names", "words"), [(["Mamba"], "of architecture Mamba$"), (None, "of a checkpoint without architectures")]
)
def test_an_architecture_without_a_native_class_is_named(names, words):
    with pytest.raises(NotNativeError, match=words):
        model_class({"architectures": names})


@pytest.mark.process
def test_transformers_is_imported_only_for_the_adapter():
    code = "import engine_worker.runner.load, sys; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
