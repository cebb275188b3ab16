"""Vision-language models: what their config.json contains about images and about the decoder."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sluice.checkpoint.scaling import Grid, Scaling

LLAVA = "LlavaForConditionalGeneration"
TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision towers with a fixed number of rows per image, with the number of rows that are not patches."""
DECODERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architectures of decoders by model_type."""
DEFAULT_LLAMA: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
"""transformers' defaults for values that are missing in the text_config of older checkpoints."""
DEFAULT_IMAGE_TOKEN = 32000
QWEN_VL = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
QWEN_DECODER = "Qwen2ForCausalLM"
DEFAULT_QWEN: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768}
"""transformers' defaults for values that are missing in config.json."""
DEFAULT_SECTIONS = (16, 24, 24)
DEFAULT_QWEN_IMAGE_TOKEN = 151655


class VisionError(ValueError):
    """A file requests something that is not supported. The message names it."""


class Vision(NamedTuple):
    """How images are represented in prompts."""

    token_id: int
    """The token of the vocabulary that is the placeholder of an image."""
    rows: int
    """Number of rows per image; with `scaling`, of the largest image."""
    scaling: Scaling | None = None
    """How the size of an image determines its rows, which then form a grid. None: the size is irrelevant."""

    def grid(self, width: int, height: int) -> Grid | None:
        """The grid of an image with this size in pixels. None if images have `rows` rows without a grid.

        Raises ScalingError.
        """
        return None if self.scaling is None else self.scaling.grid(width, height)


def split_config(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> tuple[dict[str, Any], Vision | None]:
    """The configuration of the decoder, and how it represents images. Text-only models: `raw` and None.

    `raw`: config.json. `processor`: settings of the image processor. Raises VisionError.
    """
    names = raw.get("architectures") or ()
    if LLAVA in names:
        return _llava(raw)
    if any(name in names for name in QWEN_VL):
        return _qwen(raw, processor)
    return dict(raw), None


def _llava(raw: Mapping[str, Any]) -> tuple[dict[str, Any], Vision]:
    text, tower = _part(raw, "text_config"), _part(raw, "vision_config")
    kind = str(text.get("model_type", "llama"))
    if kind not in DECODERS:
        raise VisionError(f"text_config: model_type {kind!r} is not supported; supported: {', '.join(DECODERS)}")
    decoder = (dict(DEFAULT_LLAMA) if kind == "llama" else {}) | text | _types(raw)
    decoder |= {"architectures": [DECODERS[kind]], "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False))}
    name = "image_token_id" if "image_token_id" in raw and "image_token_index" not in raw else "image_token_index"
    token_id = _token(name, raw.get(name, DEFAULT_IMAGE_TOKEN), decoder)
    return decoder, Vision(token_id, _rows(raw, tower))


def _qwen(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> tuple[dict[str, Any], Vision]:
    tower = _part(raw, "vision_config")
    # Published files have the decoder's options at the top level, next to vision_config.
    text = _part(raw, "text_config") if "text_config" in raw else {k: v for k, v in raw.items() if k != "vision_config"}
    decoder = dict(DEFAULT_QWEN) | text | _types(raw)
    tied = bool(raw.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False))
    decoder |= {"architectures": [QWEN_DECODER], "tie_word_embeddings": tied}
    name = "rope_parameters" if decoder.get("rope_parameters") else "rope_scaling"
    decoder[name] = {"mrope_section": list(DEFAULT_SECTIONS)} | (decoder.get(name) or {})
    token_id = _token("image_token_id", raw.get("image_token_id", DEFAULT_QWEN_IMAGE_TOKEN), decoder)
    try:
        scaling = Scaling.of(processor, tower)
    except ValueError as error:
        raise VisionError(str(error)) from error
    return decoder, Vision(token_id, scaling.most, scaling)


def _types(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name in ("dtype", "torch_dtype", "quantization_config") if name in raw}


def _token(name: str, token: Any, decoder: Mapping[str, Any]) -> int:
    if not isinstance(token, int) or not 0 <= token < decoder.get("vocab_size", 0):
        raise VisionError(f"{name} is {token!r}, not a token of the vocabulary")
    return token


def _rows(raw: Mapping[str, Any], tower: Mapping[str, Any]) -> int:
    kind, strategy = tower.get("model_type"), raw.get("vision_feature_select_strategy", "default")
    if kind not in TOWERS:
        raise VisionError(f"vision_config: model_type {kind!r} is not supported; supported: {', '.join(TOWERS)}")
    if strategy not in ("default", "full"):
        raise VisionError(f"vision_feature_select_strategy {strategy!r} is not supported; supported: default, full")
    image, patch = tower.get("image_size"), tower.get("patch_size")
    if not (isinstance(image, int) and isinstance(patch, int) and image >= patch >= 1):
        raise VisionError(f"vision_config: image_size {image!r} and patch_size {patch!r} give no patches")
    rows: int = (image // patch) ** 2 + TOWERS[kind] - (strategy == "default")
    if rows < 1:
        raise VisionError("vision_config: an image would have no rows")
    return rows


def _part(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = raw.get(name)
    if not isinstance(part, dict):
        raise VisionError(f"{name} is {part!r}, not an object")
    return part
