"""Bounds of the numbers in a config.json, from which services allocate memory."""

from collections.abc import Mapping
from typing import Any

from sluice.checkpoint.context import CONTEXT, MIN_CONTEXT, ORIGINAL, context_of

MAX_CONTEXT = (1 << 31) - 1
LARGEST: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_experts": 1 << 14,
    **dict.fromkeys(CONTEXT, MAX_CONTEXT),
}
"""Far beyond those of any model."""
MAX_TOKEN_ID = (1 << 31) - 1


def wrong_size(config: Mapping[str, Any]) -> str | None:
    """The first number out of its bounds, with what it must be. Some architectures have a list with a number per layer,
    which they check themselves."""
    for name, largest in LARGEST.items():
        value = config.get(name)
        if value is None or isinstance(value, list):
            continue
        least = MIN_CONTEXT if name in CONTEXT else 1
        if not _is_whole(value) or not least <= value <= largest:
            return f"{name} must be an integer from {least} to {largest} (got {_shown(value)})"
    if not _has_context(config):
        return f"factor and {ORIGINAL} of the rope must give {MIN_CONTEXT} to {MAX_CONTEXT} tokens"
    return None


def _has_context(config: Mapping[str, Any]) -> bool:
    try:
        return MIN_CONTEXT <= context_of(config) <= MAX_CONTEXT
    except OverflowError:
        return False


def wrong_eos(config: Mapping[str, Any]) -> str | None:
    """What is wrong with `eos_token_id`, if anything."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if all(_is_whole(each) and -MAX_TOKEN_ID <= each <= MAX_TOKEN_ID for each in ids):
        return None
    return f"eos_token_id must be a token id or a list of token ids (got {_shown(value)})"


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except ValueError:
        # Python does not convert integers of thousands of digits.
        return "a very large integer"
