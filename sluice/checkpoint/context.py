"""The maximum context length in a config.json."""

import math
from collections.abc import Mapping
from typing import Any

CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names of the maximum context length in the configurations of different architectures."""
DEFAULT_CONTEXT = 2048
MIN_CONTEXT = 2
"""A token of the prompt and one of the output."""
ORIGINAL = "original_max_position_embeddings"


def context_of(config: Mapping[str, Any]) -> int:
    """Tokens. With YaRN (arXiv:2309.00071) the length before scaling times its factor, since many files have the former
    as their maximum."""
    values = (config.get(name) for name in CONTEXT)
    tokens = int(next((tokens for tokens in values if tokens is not None), DEFAULT_CONTEXT))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return tokens
    scaled = rope.get("factor"), rope.get(ORIGINAL) or config.get(ORIGINAL) or tokens
    numbers = [value for value in scaled if isinstance(value, int | float) and math.isfinite(value)]
    return int(math.prod(numbers)) if len(numbers) == len(scaled) else tokens
