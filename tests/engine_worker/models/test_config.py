import pytest

from engine_worker.layers.rotary import LinearScaling, Llama3Scaling, Rope
from engine_worker.models.registry import model_class
from sluice.ring.checkpoint import CheckpointError
from tests.engine_worker.models.checkpoints import LLAMA3_ROPE, SIZES

LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}


def read(raw):
    return model_class(raw).read_config(raw)


def test_defaults():
    found = read(LLAMA)
    assert (found.heads.num_kv_heads, found.heads.head_dim) == (4, 12)
    assert found.rope == Rope(10000.0)
    assert not found.tie_word_embeddings
    assert read(QWEN3).heads.head_dim == 128


def test_old_and_new_rope_keys():
    old = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    expected = Rope(10000.0, Llama3Scaling(4.0, 1.0, 4.0, 64))
    assert read(LLAMA | {"rope_parameters": LLAMA3_ROPE}).rope == expected
    assert read(LLAMA | {"rope_scaling": old, "rope_theta": 10000.0}).rope == expected
    assert read(LLAMA | {"rope_scaling": None, "rope_theta": 7.0}).rope == Rope(7.0)
    linear = {"type": "linear", "factor": 3.0}
    assert read(LLAMA | {"rope_scaling": linear, "rope_theta": 9.0}).rope == Rope(9.0, LinearScaling(3.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM .* supported: LlamaForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": None}, "none given"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window = True"),
        ({"sliding_window": 64}, "sliding_window = 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "llama3 lacks 'low_freq_factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, words):
    with pytest.raises(CheckpointError, match=words):
        read(LLAMA | change)


def test_a_window_that_is_off_is_fine():
    assert read(QWEN3 | {"use_sliding_window": False, "sliding_window": 4096, "layer_types": ["full_attention"] * 2})
