"""Reads and validates config.json of a decoder: an option that is missing or not supported raises an error that names
it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine_worker.attention.backend import HeadShape
from engine_worker.layers.rotary import LinearScaling, Llama3Scaling, Rope
from sluice.checkpoint.errors import CheckpointError

Windows = tuple[int | None, ...]
"""Attention window of each layer in tokens; None: full attention."""

FULL, SLIDING = "full_attention", "sliding_attention"
# transformers' defaults: it omits options with these values from config.json.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (1,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_scale": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}
"""Options that our models do not implement, with the values for which they can be ignored. They may be absent."""


class NotNativeError(CheckpointError):
    """config.json has an option that our own model classes do not support; transformers' modules may support it."""


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
    """Whether the query, key and value projections have biases."""
    output_bias: bool
    """Whether attention's output projection has a bias."""
    mlp_bias: bool
    tie_word_embeddings: bool
    head_norms: bool
    """Whether each query and key head is normalized by an RMSNorm (Qwen3)."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def no_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Full attention in every layer (Llama). Raises NotNativeError if config.json has a sliding window."""
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
    """`sliding_window` if `use_sliding_window`: in the layers that `layer_types` marks or, without that option, in
    layers from `max_window_layers` on. Raises CheckpointError."""
    window = _window(raw) if raw.get("use_sliding_window") else None
    if raw.get("layer_types") is None:
        first = raw.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if not isinstance(first, int):
            raise CheckpointError(f"config.json: max_window_layers must be an integer (got {first!r})")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    _check_types(raw, num_layers, *((FULL,) if window is None else (FULL, SLIDING)))
    return tuple(window if kind == SLIDING else None for kind in raw["layer_types"])


def narrow_windows(windows: Windows, limits: Sequence[int], max_context: int) -> Windows:
    """The smaller of each layer's window and its limit. If there are fewer limits than layers, they repeat, as in
    TensorRT-LLM's max_attention_window. A window of `max_context` tokens or more has no effect and becomes None."""
    narrowed = []
    for layer, window in enumerate(windows):
        smaller = min(window or max_context, limits[layer % len(limits)] if limits else max_context)
        narrowed.append(smaller if smaller < max_context else None)
    return tuple(narrowed)


def widest_window(windows: Windows) -> int | None:
    """The widest window of any layer; None if a layer has full attention."""
    limited = [window for window in windows if window is not None]
    return max(limited) if len(limited) == len(windows) else None


def read_decoder(
    raw: Mapping[str, Any],
    *,
    mlp_bias: bool = False,
    read_windows: Callable[[Mapping[str, Any], int], Windows] = no_windows,
    head_norms: bool = False,
) -> DecoderConfig:
    """raw: config.json. mlp_bias: whether the family supports that option. read_windows: (config.json, number of
    layers) -> each layer's window. head_norms: whether the family normalizes each query and key head.

    Raises CheckpointError on an option that is missing or invalid, NotNativeError on one that is not supported.
    """
    _refuse_unsupported(raw, mlp_bias)
    hidden_size, num_heads = size(raw, "hidden_size"), size(raw, "num_attention_heads")
    num_kv_heads = size(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}"
        )
    head_dim = size(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim = {head_dim} must be even for the rotary embedding")
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
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive integer (got {value!r})")
    return value


def _read_rope(raw: Mapping[str, Any]) -> Rope:
    """Checkpoints of transformers 5 have `rope_parameters`; older ones have `rope_theta` and `rope_scaling`."""
    options = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in options.values()):
        raise NotNativeError("config.json: rope_parameters per layer type are not supported")
    kind = options.get("rope_type", options.get("type", "default"))
    theta = float(options.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if options.get("partial_rotary_factor", 1.0) != 1.0:
        factor = options["partial_rotary_factor"]
        raise NotNativeError(f"config.json: partial_rotary_factor = {factor} is not supported")
    try:
        match kind:
            case "default" | "mrope":
                return Rope(theta)
            case "linear":
                return Rope(theta, LinearScaling(float(options["factor"])))
            case "llama3":
                numbers = {field.name: float(options[field.name]) for field in fields(Llama3Scaling)}
                return Rope(theta, Llama3Scaling(**numbers))
    except KeyError as error:
        raise CheckpointError(f"config.json: rope type {kind} requires {error}, which is missing") from error
    raise NotNativeError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")


def _with_sections(raw: Mapping[str, Any], rope: Rope, head_dim: int) -> Rope:
    """Adds `mrope_section`, if config.json has it. Raises CheckpointError if it is invalid."""
    sections = (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("mrope_section")
    if sections is None:
        return rope
    match sections:
        case [int(time), int(line), int(column)] if min(sections) >= 0 and sum(sections) == head_dim // 2:
            return replace(rope, sections=(time, line, column))
    raise CheckpointError(
        f"config.json: mrope_section must be three numbers whose sum is {head_dim // 2} (got {sections!r})"
    )


def _window(raw: Mapping[str, Any]) -> int | None:
    window = raw.get("sliding_window", DEFAULT_WINDOW)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise CheckpointError(f"config.json: sliding_window must be a positive integer or null (got {window!r})")
    return window


def _check_types(raw: Mapping[str, Any], num_layers: int, *supported: str) -> None:
    """Raises NotNativeError if `layer_types` names a type that is not supported, and CheckpointError if it does not
    have one type per layer."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return
    unsupported = sorted({str(kind) for kind in kinds} - set(supported))
    if unsupported:
        raise NotNativeError(f"config.json: layer_types {', '.join(unsupported)} are not supported")
    if len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
