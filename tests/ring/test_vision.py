"""config.json of models that see: the decoder's part, and how many tokens an image takes."""

import json

import pytest

from sluice import tiny_model
from sluice.ring.checkpoint import CheckpointError, model_fingerprint, open_checkpoint
from sluice.ring.vision import Vision, VisionError, split_config

LLAVA_7B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
"""As published."""


def changed(part: str | None = None, **values) -> dict:
    raw = json.loads(json.dumps(LLAVA_7B))
    (raw if part is None else raw[part]).update(values)
    return raw


def test_llava_as_published():
    decoder, vision = split_config(LLAVA_7B)
    assert vision == Vision(32000, 576)
    assert decoder["architectures"] == ["LlamaForCausalLM"]
    assert decoder["vocab_size"] == 32064
    assert decoder["hidden_size"] == 4096
    assert decoder["max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("raw", "rows"),
    [
        (changed(vision_feature_select_strategy="full"), 577),
        (changed("vision_config", image_size=224), 256),
        (changed("vision_config", model_type="siglip_vision_model", image_size=384, patch_size=27), 195),
    ],
)
def test_rows_of_an_image(raw, rows):
    assert split_config(raw)[1].rows == rows


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (changed("vision_config", model_type="pixtral"), "model_type 'pixtral' is not supported"),
        (changed("vision_config", image_size=None), "give no patches"),
        (changed("text_config", model_type="gpt2"), "model_type 'gpt2' is not supported"),
        (changed(image_token_index=99999), "image_token_index is 99999"),
        (changed(vision_feature_select_strategy="some"), "'some' is not supported"),
        (changed(text_config=None), "text_config is None"),
    ],
)
def test_what_is_not_supported_is_named(raw, reason):
    with pytest.raises(VisionError, match=reason):
        split_config(raw)


def test_other_models_have_no_images(tmp_path):
    raw = json.loads((tiny_model.path() / "config.json").read_text())
    assert split_config(raw) == (raw, None)
    assert open_checkpoint(str(tiny_model.path())).vision is None


def test_the_fingerprint_covers_how_pixels_are_read(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model.path() / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_7B))
    before = model_fingerprint(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": true}')
    assert model_fingerprint(tmp_path) != before
    (tmp_path / "config.json").write_text(json.dumps(changed(text_config=3)))
    with pytest.raises(CheckpointError, match=r"config.json: text_config is 3"):
        open_checkpoint(str(tmp_path))


def test_chat_templates_of_processors(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model.path() / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_7B))
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ 1 }}"}')
    assert open_checkpoint(str(tmp_path)).chat_template == "{{ 1 }}"
