"""Vision-language models: what their configuration says about images and about the decoder, and the grid of an image's
rows."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

LLAVA = "LlavaForConditionalGeneration"
TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision towers with a fixed number of rows per image, and how many of these rows are not patches."""
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
MAX_ROWS = 4096
"""Maximum number of rows of an image. Larger images are scaled down, even if the checkpoint allows more, because the
work of the vision tower grows with the square of the number of rows."""
MAX_RATIO = 200
"""Maximum ratio of an image's longer side to its shorter one."""
PATCH, MERGE = 14, 2
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280
"""transformers' defaults for values that are missing in the checkpoint's files."""


class VisionError(ValueError):
    """A file requests something that is not supported. The message names it."""


class ScalingError(ValueError):
    """An image cannot be scaled. The message continues a field's name with the reason."""


class Grid(NamedTuple):
    """The grid of an image's rows, which are ordered line by line."""

    lines: int
    columns: int

    @property
    def rows(self) -> int:
        return self.lines * self.columns


class Scaling(NamedTuple):
    """How Qwen2-VL scales an image before encoding, by the arithmetic of transformers' `smart_resize`, which depends
    only on the size of the image."""

    cell: int
    """Side length in pixels of the square that a row represents."""
    least_pixels: int
    most_pixels: int

    @staticmethod
    def of(processor: Mapping[str, Any], tower: Mapping[str, Any]) -> "Scaling":
        """`processor`: preprocessor_config.json. `tower`: vision_config. Raises VisionError."""
        if processor.get("do_resize", True) is not True:
            raise VisionError("preprocessor_config.json: do_resize = false is not supported")
        patch, merge = _size(processor, "patch_size", PATCH), _size(processor, "merge_size", MERGE)
        for name, value, default in (("patch_size", patch, PATCH), ("spatial_merge_size", merge, MERGE)):
            if tower.get(name, default) != value:
                raise VisionError(
                    f"vision_config: {name} is {tower.get(name, default)!r}, but preprocessor_config.json has {value}"
                )
        cell, size = patch * merge, processor.get("size")
        size = size if isinstance(size, Mapping) else {}
        # As in transformers, the names of older files take precedence.
        limits = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        limits |= {name: processor[name] for name in limits if processor.get(name) is not None}
        least = _size(limits, "min_pixels", LEAST_PIXELS)
        most = min(_size(limits, "max_pixels", MOST_PIXELS), MAX_ROWS * cell**2)
        if not max(least, cell**2) <= most:
            raise VisionError(f"preprocessor_config.json: min_pixels {least} and max_pixels {most} allow no image")
        return Scaling(cell, least, most)

    @property
    def most(self) -> int:
        """Maximum number of rows of an image."""
        return self.most_pixels // self.cell**2

    def grid(self, width: int, height: int) -> Grid:
        """The grid of an image with this size in pixels. Raises ScalingError."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ScalingError(
                f"has {width} x {height} pixels: one side may be at most {MAX_RATIO} times as long as the other"
            )
        cell, pixels = self.cell, width * height
        lines, columns = round(height / cell), round(width / cell)
        if lines * columns * cell**2 > self.most_pixels:
            factor = math.sqrt(pixels / self.most_pixels)
            lines, columns = (max(1, math.floor(side / factor / cell)) for side in (height, width))
        elif lines * columns * cell**2 < self.least_pixels:
            factor = math.sqrt(self.least_pixels / pixels)
            lines, columns = (math.ceil(side * factor / cell) for side in (height, width))
        return Grid(lines, columns)


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
    scaling = Scaling.of(processor, tower)
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


def _size(raw: Mapping[str, Any], name: str, default: int) -> int:
    size = raw.get(name)
    size = default if size is None else size
    if not isinstance(size, int) or size < 1:
        raise VisionError(f"preprocessor_config.json: {name} must be a positive integer (got {size!r})")
    return size
