"""Sliding windows per layer: a token sees the last `window` tokens, itself included."""

from collections.abc import Mapping, Sequence
from typing import Any

from sluice.ring.checkpoint import CheckpointError

Windows = tuple[int | None, ...]
"""One per layer; None: full attention."""

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


class NotNativeError(CheckpointError):
    """config.json asks for something that our own model classes do not compute; transformers' might."""


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
