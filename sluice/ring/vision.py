"""Models that see: what their config.json says of images, and of the decoder behind them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

ARCHITECTURE = "LlavaForConditionalGeneration"
TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Those with a fixed number of rows per image, and how many of these are no patches."""
DECODERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architectures by model_type."""
DEFAULT_LLAMA: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
"""What older checkpoints leave out of text_config: transformers' defaults."""
DEFAULT_IMAGE_TOKEN = 32000


class VisionError(ValueError):
    """config.json asks for something that is not supported; the message says what."""


class Vision(NamedTuple):
    """How images stand in prompts."""

    token_id: int
    """The placeholder of an image, in the vocabulary."""
    rows: int
    """Per image, whatever its size."""


def split_config(raw: Mapping[str, Any]) -> tuple[dict[str, Any], Vision | None]:
    """config.json of the decoder alone, and what images are to it; as it is and None of a model without. Raises
    VisionError."""
    if ARCHITECTURE not in (raw.get("architectures") or ()):
        return dict(raw), None
    text, tower = _part(raw, "text_config"), _part(raw, "vision_config")
    kind = str(text.get("model_type", "llama"))
    if kind not in DECODERS:
        raise VisionError(f"text_config: model_type {kind!r} is not supported; supported: {', '.join(DECODERS)}")
    types = {name: raw[name] for name in ("dtype", "torch_dtype", "quantization_config") if name in raw}
    decoder = (dict(DEFAULT_LLAMA) if kind == "llama" else {}) | text | types
    decoder |= {"architectures": [DECODERS[kind]], "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False))}
    token_id = raw.get("image_token_index", raw.get("image_token_id", DEFAULT_IMAGE_TOKEN))
    if not isinstance(token_id, int) or not 0 <= token_id < decoder.get("vocab_size", 0):
        raise VisionError(f"image_token_index is {token_id!r}, not a token of the vocabulary")
    return decoder, Vision(token_id, _rows(raw, tower))


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
    found = raw.get(name)
    if not isinstance(found, dict):
        raise VisionError(f"{name} is {found!r}, not an object")
    return found
