import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_worker.layers.rotary import frequencies
from engine_worker.models.registry import find_model
from sluice.checkpoint.gguf import GgufError, read_gguf
from sluice.gguf.config import config_of, generation_of
from tests.fakes.gguf_file import finish

SIZES = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def write(file, architecture="llama", own=None, others=None, tensors=()):
    """own: metadata of the architecture; None leaves one out."""
    writer = gguf.GGUFWriter(file, architecture)
    fields = {f"{architecture}.{name}": value for name, value in {**SIZES, **(own or {})}.items()} | (others or {})
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](name, value)
    for name, values in {"token_embd.weight": np.zeros((100, 64), np.float32), **dict(tensors)}.items():
        writer.add_tensor(name, values)
    finish(writer)
    return file


def config(tmp_path, *args, **kwargs):
    file = write(tmp_path / "a.gguf", *args, **kwargs)
    return config_of(file, read_gguf(file))


def test_sizes(tmp_path):
    found = find_model(config(tmp_path)).config
    assert (found.vocab_size, found.hidden_size, found.intermediate_size, found.num_layers) == (100, 64, 96, 2)
    assert (found.heads.num_heads, found.heads.num_kv_heads, found.heads.head_dim) == (4, 2, 16)
    assert found.tie_word_embeddings
    assert not found.attention_bias


def test_a_head_of_its_own_and_biases(tmp_path):
    tensors = {"output.weight": np.zeros((100, 64), np.float32), "blk.0.attn_q.bias": np.zeros(64, np.float32)}
    found = find_model(config(tmp_path, tensors=tensors)).config
    assert not found.tie_word_embeddings
    assert found.attention_bias


@pytest.mark.parametrize(
    ("own", "rope"),
    [
        ({"rope.freq_base": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope.scale_linear": 4.0}, {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024},
            {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {"rope_theta": 1e4, "rope_type": "default"}),
    ],
)
def test_rope(tmp_path, own, rope):
    assert config(tmp_path, own=own)["rope_parameters"] == rope


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_become_its_options(tmp_path, factor):
    """The factors as llama.cpp's converter computes them, from transformers' frequencies."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192, **scaling}
    theirs = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=131072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    plain = 5e5 ** (-torch.arange(0, 128, 2).float() / 128)
    own = {"embedding_length": 512, "rope.freq_base": 5e5, "rope.dimension_count": 128}
    tensors = {
        "token_embd.weight": np.zeros((100, 512), np.float32),
        "rope_freqs.weight": (plain / expected).numpy().astype(np.float32),
    }
    found = config(tmp_path, own=own, tensors=tensors)
    assert found["rope_parameters"] == pytest.approx(rope)
    rebuilt = frequencies(find_model(found).config.rope, 128)
    torch.testing.assert_close(rebuilt, expected, atol=0, rtol=1e-5)


def test_unknown_factors_are_refused(tmp_path):
    factors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(GgufError, match="that is not that of a Llama 3 model"):
        config(tmp_path, tensors=factors)


@pytest.mark.parametrize(
    ("architecture", "own", "named"),
    [
        ("gemma3", {}, "architecture 'gemma3', which is not supported; supported: llama, qwen2"),
        ("llama", {"expert_count": 8}, "Mixtral"),
        ("llama", {"logit_scale": 0.1}, r"the option llama\.logit_scale"),
        ("llama", {"attention.sliding_window": 128}, r"the option llama\.attention\.sliding_window"),
        ("llama", {"block_count": None}, r"no llama\.block_count"),
        ("llama", {"block_count": 0}, r"llama\.block_count = 0, must be a positive number"),
        ("llama", {"attention.head_count": [4, 4]}, r"llama\.attention\.head_count = \[4, 4\]"),
        ("llama", {"rope.dimension_count": 8}, r"rope\.dimension_count = 8, supported is only the size of a head, 16"),
        ("llama", {"attention.value_length": 8}, r"attention\.value_length = 8"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "'longrope'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, architecture, own, named):
    with pytest.raises(GgufError, match=named):
        config(tmp_path, architecture, own)


def test_ends_and_sampling(tmp_path):
    tokens = {"tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|eot_id|>"], "tokenizer.ggml.token_type": [1, 1, 3]}
    ids = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}

    def found(**more):
        return generation_of(read_gguf(write(tmp_path / "b.gguf", others=tokens | ids | more)))

    # A token that says by its name that it ends a turn, and is no text.
    assert found() == {"bos_token_id": 0, "eos_token_id": [1, 2]}
    assert found(**{"tokenizer.ggml.eot_token_id": 0})["eos_token_id"] == [1, 0]
    assert found(**sampling) == {
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 20,
    }


def test_transformers_reads_the_configuration(tmp_path):
    (tmp_path / "folder").mkdir()
    import json

    (tmp_path / "folder" / "config.json").write_text(json.dumps(config(tmp_path, "qwen3")))
    assert AutoConfig.from_pretrained(tmp_path / "folder").num_key_value_heads == 2
