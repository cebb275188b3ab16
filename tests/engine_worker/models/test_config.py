import pytest
import transformers

from engine_worker.layers.moe import ExpertShape
from engine_worker.layers.rotary import LinearScaling, Llama3Scaling, Rope
from engine_worker.models.config import NotNativeError, narrow_windows, widest_window
from engine_worker.models.registry import model_class
from sluice.checkpoint.errors import CheckpointError
from tests.engine_worker.models.checkpoints import LLAMA3_ROPE, SIZES

LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def read(raw):
    return model_class(raw).read_config(raw)


def test_defaults():
    config = read(LLAMA)
    assert (config.heads.num_kv_heads, config.heads.head_dim) == (4, 12)
    assert config.rope == Rope(10000.0)
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.output_bias
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
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window = True"),
        ({"sliding_window": 64}, "sliding_window = 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_unsupported_options_are_refused_by_name(change, words):
    with pytest.raises(NotNativeError, match=words):
        read(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "llama3 requires 'low_freq_factor'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
    ],
)
def test_invalid_options_are_refused_by_name(change, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        read(LLAMA | change)
    assert not isinstance(caught.value, NotNativeError)


def test_a_window_that_is_switched_off_is_accepted():
    assert read(QWEN3 | {"use_sliding_window": False, "sliding_window": 4096, "layer_types": ["full_attention"] * 2})
    assert read(LLAMA | {"use_sliding_window": False, "sliding_window": 4096}).windows == (None, None)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("architecture", "options", "windows"),
    [
        ("Llama", {}, (None, None, None)),
        ("Mistral", {"sliding_window": 64}, (64, 64, 64)),
        ("Mistral", {"sliding_window": None}, (None, None, None)),
        ("Mistral", {}, (4096, 4096, 4096)),
        ("Qwen2", {}, (None, None, None)),
        ("Qwen2", {"sliding_window": 64, "max_window_layers": 0}, (None, None, None)),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (None, 64, 64)),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 64}, (None, None, None)),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None, None, None)),
        (
            "Qwen3",
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]},
            (9, None, 9),
        ),
    ],
)
def test_windows_are_those_of_transformers(architecture, options, windows):
    raw = LLAMA | {"num_hidden_layers": 3, "architectures": [f"{architecture}ForCausalLM"]} | options
    assert read(raw).windows == windows
    config_class = getattr(transformers, f"{architecture}Config")
    expected = config_class(**{key: raw[key] for key in raw if key != "architectures"})
    sliding = getattr(expected, "sliding_window", None)
    kinds = getattr(expected, "layer_types", None) or [SLIDING] * 3
    assert tuple(sliding if kind == SLIDING else None for kind in kinds) == windows


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("Mistral", {"sliding_window": 0}, "sliding_window must be a positive integer or null \\(got 0\\)"),
        ("Mistral", {"sliding_window": 8, "layer_types": [FULL, SLIDING]}, "layer_types full_attention"),
        ("Mistral", {"sliding_window": None, "layer_types": [FULL, SLIDING]}, "layer_types sliding_attention"),
        ("Qwen3", {"layer_types": [FULL, SLIDING]}, "layer_types sliding_attention"),
        ("Qwen3", {"use_sliding_window": True, "layer_types": [FULL, "chunked_attention"]}, "chunked_attention"),
        ("Qwen2", {"use_sliding_window": True, "layer_types": [SLIDING]}, "layer_types has 1 entries for 2 layers"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers must be an integer"),
    ],
)
def test_invalid_windows_are_refused(architecture, options, words):
    with pytest.raises(CheckpointError, match=words):
        read(LLAMA | {"architectures": [f"{architecture}ForCausalLM"]} | options)


def test_experts():
    config = read(MOE)
    assert config.experts == ExpertShape(8, 2, 24, normalized=False)
    assert config.sparse == (True, True)
    assert read(MOE | {"num_experts": None, "num_local_experts": 4}).experts.num_experts == 4
    assert read(MOE | {"norm_topk_prob": True}).experts.normalized
    mixed = read(MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert mixed.sparse == (False, True, False, False, False, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": None}, "num_experts must be a positive integer"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({"moe_intermediate_size": 20}, "moe_intermediate_size must be a multiple of 8 \\(got 20\\)"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers"),
        ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window must be a positive integer"),
    ],
)
def test_invalid_options_of_experts_are_refused(change, words):
    with pytest.raises(CheckpointError, match=words):
        read(MOE | change)


def test_a_limit_narrows_and_is_repeated_over_the_layers():
    assert narrow_windows((None, 64, None, 64), (), 1000) == (None, 64, None, 64)
    assert narrow_windows((None, 64, None, 64), (32,), 1000) == (32, 32, 32, 32)
    assert narrow_windows((None, 64, None, 64), (100,), 1000) == (100, 64, 100, 64)
    assert narrow_windows((None, None, None, None, None), (8, 16), 1000) == (8, 16, 8, 16, 8)
    assert narrow_windows((None, None, 64), (8, 1000), 1000) == (8, None, 8)


def test_a_window_as_long_as_the_context_becomes_none():
    assert narrow_windows((63, 64, 65, None), (), 64) == (63, None, None, None)


def test_there_is_no_widest_window_if_a_layer_has_full_attention():
    assert widest_window((4, 16, 8)) == 16
    assert widest_window((4, None, 8)) is None
