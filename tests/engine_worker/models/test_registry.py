import subprocess
import sys

import pytest

from engine_worker.models.config import NotNativeError
from engine_worker.models.qwen3 import Qwen3Moe
from engine_worker.models.registry import find_model, model_class
from tests.engine_worker.models.checkpoints import CONFIGS


def test_our_own_come_first():
    raw = CONFIGS["qwen3 moe"].to_dict() | {"architectures": ["Strange", "Qwen3MoeForCausalLM"]}
    found = find_model(raw)
    assert found.architecture is Qwen3Moe
    assert found.choices == {"implementation": "sluice"}


def test_what_our_own_does_not_compute_goes_to_transformers():
    raw = CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"}
    found = find_model(raw)
    assert found.choices == {
        "implementation": "transformers",
        "implementation_reason": "config.json: hidden_act = 'gelu' is not supported",
    }
    assert found.config.num_layers == 2


@pytest.mark.parametrize(("names", "words"), [(["Mamba"], "for Mamba"), (None, "for no architecture")])
def test_there_is_not_always_one(names, words):
    with pytest.raises(NotNativeError, match=words):
        model_class({"architectures": names})


@pytest.mark.process
def test_transformers_is_imported_for_the_adapter_alone():
    code = "import engine_worker.runner.load, sys; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
