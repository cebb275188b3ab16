"""config.json of vision-language models: the decoder's part, and the number of tokens of an image.

The grid of an image, computed from its size, is that of transformers' processor.
"""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from engine_worker.layers.rotary import Rope
from engine_worker.models.registry import model_class
from sluice import tiny_model
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.fingerprint import model_fingerprint
from sluice.checkpoint.folder import open_checkpoint
from sluice.checkpoint.vision import MAX_ROWS, Grid, Scaling, ScalingError, Vision, VisionError, split_config
from tests.examples import examples

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


QWEN2_VL_2B = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
"""As published, like its processor below."""
QWEN2_PROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessor",
}


def changed(part: str | None = None, **values) -> dict:
    raw = json.loads(json.dumps(LLAVA_7B))
    (raw if part is None else raw[part]).update(values)
    return raw


def test_llava_as_published():
    decoder, vision = split_config(LLAVA_7B, {})
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
    assert split_config(raw, {})[1].rows == rows


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
def test_unsupported_values_are_named(raw, reason):
    with pytest.raises(VisionError, match=reason):
        split_config(raw, {})


def test_qwen2_vl_as_published():
    decoder, vision = split_config(QWEN2_VL_2B, QWEN2_PROCESSOR)
    assert vision == Vision(151655, 4096, Scaling(28, 3136, 4096 * 784))
    assert vision.grid(1000, 700) == Grid(25, 36)
    assert decoder["architectures"] == ["Qwen2ForCausalLM"]
    assert decoder["tie_word_embeddings"] is True
    config = model_class(decoder).read_config(decoder)
    assert config.rope == Rope(1000000.0, sections=(16, 24, 24))
    assert config.heads.head_dim == 128


def test_newer_files_have_a_separate_part_for_the_decoder():
    flat, _ = split_config(QWEN2_VL_2B, QWEN2_PROCESSOR)
    outside = ("architectures", "image_token_id", "vision_config", "model_type", "torch_dtype")
    text = {name: value for name, value in QWEN2_VL_2B.items() if name not in outside}
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    raw = {name: QWEN2_VL_2B[name] for name in outside} | {"text_config": text}
    raw["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    decoder, vision = split_config(raw, QWEN2_PROCESSOR)
    assert vision == Vision(151655, 4096, Scaling(28, 3136, 4096 * 784))
    assert model_class(decoder).read_config(decoder) == model_class(flat).read_config(flat)
    assert decoder["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"image_token_id": 151936}, "image_token_id is 151936, not a token"),
        ({"vision_config": None}, "vision_config is None"),
        ({"vision_config": {"patch_size": 16}}, "patch_size is 16, but preprocessor_config.json has 14"),
        ({"text_config": 3}, "text_config is 3"),
    ],
)
def test_unsupported_values_of_qwen2_vl_are_named(raw, reason):
    with pytest.raises(VisionError, match=reason):
        split_config(QWEN2_VL_2B | raw, QWEN2_PROCESSOR)


@pytest.mark.parametrize("sections", [[16, 24], [16, 24, 25], "16", [-1, 41, 24]])
def test_sections_that_do_not_match_the_heads_are_refused(sections):
    scaling = {"type": "mrope", "mrope_section": sections}
    decoder, _ = split_config(QWEN2_VL_2B | {"rope_scaling": scaling}, QWEN2_PROCESSOR)
    with pytest.raises(CheckpointError, match="mrope_section must be three numbers whose sum is 64"):
        model_class(decoder).read_config(decoder)


def test_the_processor_is_read_from_where_transformers_looks(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model.path() / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_VL_2B))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 78400}))
    assert open_checkpoint(str(tmp_path)).vision.rows == 100
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"max_pixels": 7840}}))
    assert open_checkpoint(str(tmp_path)).vision.rows == 10


def test_text_only_models_do_not_accept_images(tmp_path):
    raw = json.loads((tiny_model.path() / "config.json").read_text())
    assert split_config(raw, {}) == (raw, None)
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


PUBLISHED = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}


@examples(500)
@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from([(28, 3136, 1003520), (8, 256, 1920), (6, 1, 36)]))
def test_the_grid_is_that_of_transformers(width, height, numbers):
    assume(max(width, height) <= 200 * min(width, height))
    scaling = Scaling(*numbers)
    lines, columns = (side // scaling.cell for side in smart_resize(height, width, *numbers))
    assert scaling.grid(width, height) == Grid(lines, columns)
    assert lines * columns >= 1


def test_published_limits_are_lowered():
    scaling = Scaling.of(PUBLISHED, {"patch_size": 14})
    assert scaling == Scaling(28, 3136, MAX_ROWS * 28 * 28)
    assert scaling.most == MAX_ROWS
    assert scaling.grid(4096, 4096) == Grid(64, 64)
    assert scaling.grid(1, 1) == Grid(2, 2)


def test_names_of_newer_files():
    size = {"shortest_edge": 784, "longest_edge": 78400}
    assert Scaling.of({"size": size}, {}) == Scaling(28, 784, 78400)
    assert Scaling.of({"size": size, "min_pixels": 1568, "max_pixels": None}, {}) == Scaling(28, 1568, 78400)
    assert Scaling.of({}, {}) == Scaling(28, 3136, 1003520)


@pytest.mark.parametrize(
    ("processor", "tower", "reason"),
    [
        ({"do_resize": False}, {}, "do_resize = false is not supported"),
        ({"patch_size": "14"}, {}, r"patch_size must be a positive integer \(got '14'\)"),
        ({"max_pixels": 0}, {}, r"max_pixels must be a positive integer \(got 0\)"),
        ({"patch_size": 16}, {"patch_size": 14}, "patch_size is 14, but preprocessor_config.json has 16"),
        ({}, {"spatial_merge_size": 4}, "spatial_merge_size is 4, but preprocessor_config.json has 2"),
        ({"min_pixels": 10**9}, {}, "allow no image"),
        ({"max_pixels": 783, "min_pixels": 1}, {}, "allow no image"),
    ],
)
def test_unsupported_scalings_are_named(processor, tower, reason):
    with pytest.raises(ValueError, match=reason):
        Scaling.of(processor, tower)


def test_images_with_an_extreme_ratio_are_refused():
    scaling = Scaling(28, 3136, 1003520)
    assert scaling.grid(200, 1).rows > 1
    with pytest.raises(ScalingError, match="201 x 1 pixels: one side may be at most 200 times as long"):
        scaling.grid(201, 1)
