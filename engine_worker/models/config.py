"""config.json of a decoder, validated: every option is present and supported, or an error names it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine_worker.attention.backend import HeadShape
from engine_worker.layers.rotary import LinearScaling, Llama3Scaling, Rope
from sluice.ring.checkpoint import CheckpointError

Windows = tuple[int | None, ...]
"""One per layer; None: full attention."""

FULL, SLIDING = "full_attention", "sliding_attention"
# transformers' defaults, which it does not write into config.json.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (1,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_scale": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}
"""Options that change what a model computes, with the values that leave our models right; absent is fine too."""


class NotNativeError(CheckpointError):
    """config.json asks for something that our own model classes do not compute; transformers' might."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and options of a native decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    windows: Windows
    heads: HeadShape
    rms_norm_eps: float
    rope: Rope
    attention_bias: bool
    """On queries, keys and values."""
    output_bias: bool
    """On attention's output projection."""
    mlp_bias: bool
    tie_word_embeddings: bool
    head_norms: bool
    """Whether each query and key head goes through an RMSNorm (Qwen3)."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def no_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Llama has none. Raises NotNativeError if config.json asks for one."""
    if raw.get("use_sliding_window"):
        raise NotNativeError("config.json: use_sliding_window = True is not supported in this architecture")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is None:
        raise NotNativeError(
            f"config.json: sliding_window = {raw['sliding_window']!r} is not supported in this architecture"
        )
    _check_types(raw, num_layers, FULL)
    return (None,) * num_layers


def mistral_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """`sliding_window` in every layer; null: full attention. Raises CheckpointError on layers that differ."""
    window = _window(raw)
    _check_types(raw, num_layers, FULL if window is None else SLIDING)
    return (window,) * num_layers


def qwen_moe_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """`sliding_window` in every layer if `use_sliding_window`. Raises CheckpointError."""
    return mistral_windows(raw, num_layers) if raw.get("use_sliding_window") else (None,) * num_layers


def qwen_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """`sliding_window` if `use_sliding_window`: in the layers that `layer_types` marks, or without it in layers from
    `max_window_layers` on. Raises CheckpointError."""
    window = _window(raw) if raw.get("use_sliding_window") else None
    if raw.get("layer_types") is None:
        first = raw.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if not isinstance(first, int):
            raise CheckpointError(f"config.json: max_window_layers must be an integer, not {first!r}")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    _check_types(raw, num_layers, *((FULL,) if window is None else (FULL, SLIDING)))
    return tuple(window if kind == SLIDING else None for kind in raw["layer_types"])


def narrow_windows(windows: Windows, limits: Sequence[int], max_context: int) -> Windows:
    """The smaller of each layer's window and its limit. Fewer limits than layers repeat, as in TensorRT-LLM's
    max_attention_window. A window of `max_context` tokens or more is dropped: it hides nothing."""
    found = []
    for layer, window in enumerate(windows):
        least = min(window or max_context, limits[layer % len(limits)] if limits else max_context)
        found.append(least if least < max_context else None)
    return tuple(found)


def widest_window(windows: Windows) -> int | None:
    """The widest window of any layer; None if a layer has full attention."""
    known = [window for window in windows if window is not None]
    return max(known) if len(known) == len(windows) else None


def read_decoder(
    raw: Mapping[str, Any],
    *,
    mlp_bias: bool = False,
    read_windows: Callable[[Mapping[str, Any], int], Windows] = no_windows,
    head_norms: bool = False,
) -> DecoderConfig:
    """`mlp_bias`: whether the family supports that option. `read_windows`: (config.json, number of layers) -> each
    layer's window.

    Raises CheckpointError on an option that is missing or invalid, NotNativeError on one that is not supported.
    """
    _refuse_unsupported(raw, mlp_bias)
    hidden_size, num_heads = size(raw, "hidden_size"), size(raw, "num_attention_heads")
    num_kv_heads = size(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = size(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd: rotary embedding needs an even one")
    return DecoderConfig(
        vocab_size=size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size(raw, "intermediate_size"),
        windows=read_windows(raw, size(raw, "num_hidden_layers")),
        heads=HeadShape(num_heads, num_kv_heads, head_dim),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_with_sections(raw, _read_rope(raw), head_dim),
        attention_bias=bool(raw.get("attention_bias", False)),
        output_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        head_norms=head_norms,
    )


def _refuse_unsupported(raw: Mapping[str, Any], mlp_bias: bool) -> None:
    for name, neutral in NEUTRAL.items():
        if name in raw and raw[name] not in neutral:
            raise NotNativeError(f"config.json: {name} = {raw[name]!r} is not supported")
    if raw.get("mlp_bias") and not mlp_bias:
        raise NotNativeError("config.json: mlp_bias = true is not supported in this architecture")


def size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer option. Raises CheckpointError."""
    found = raw.get(name)
    found = default if found is None else found
    if not isinstance(found, int) or found < 1:
        raise CheckpointError(f"config.json: {name} must be a positive integer, not {found!r}")
    return found


def _read_rope(raw: Mapping[str, Any]) -> Rope:
    """Checkpoints of transformers 5 have `rope_parameters`; older ones `rope_theta` and `rope_scaling`."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in found.values()):
        raise NotNativeError("config.json: rope_parameters per layer type are not supported")
    kind = found.get("rope_type", found.get("type", "default"))
    theta = float(found.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotNativeError(f"config.json: partial_rotary_factor = {found['partial_rotary_factor']} is not supported")
    try:
        match kind:
            case "default" | "mrope":
                return Rope(theta)
            case "linear":
                return Rope(theta, LinearScaling(float(found["factor"])))
            case "llama3":
                numbers = {field.name: float(found[field.name]) for field in fields(Llama3Scaling)}
                return Rope(theta, Llama3Scaling(**numbers))
    except KeyError as error:
        raise CheckpointError(f"config.json: rope type {kind} lacks {error}") from error
    raise NotNativeError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")


def _with_sections(raw: Mapping[str, Any], rope: Rope, head_dim: int) -> Rope:
    """Raises CheckpointError."""
    found = (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("mrope_section")
    if found is None:
        return rope
    match found:
        case [int(time), int(line), int(column)] if min(found) >= 0 and sum(found) == head_dim // 2:
            return replace(rope, sections=(time, line, column))
    raise CheckpointError(
        f"config.json: mrope_section must be three numbers that are {head_dim // 2} together, not {found!r}"
    )


def _window(raw: Mapping[str, Any]) -> int | None:
    found = raw.get("sliding_window", DEFAULT_WINDOW)
    if found is not None and (not isinstance(found, int) or found < 1):
        raise CheckpointError(f"config.json: sliding_window must be a positive integer or null, not {found!r}")
    return found


def _check_types(raw: Mapping[str, Any], num_layers: int, *supported: str) -> None:
    kinds = raw.get("layer_types")
    if kinds is None:
        return
    other = sorted({str(kind) for kind in kinds} - set(supported))
    if other:
        raise NotNativeError(f"config.json: layer_types {', '.join(other)} are not supported")
    if len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
