"""The numbers in a config.json that services use: context length, EOS tokens, and the bounds of the sizes from which
services allocate memory."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names of the maximum context length in the configurations of different architectures."""
DEFAULT_CONTEXT = 2048
MIN_CONTEXT = 2
"""A token of the prompt and one of the output."""
ORIGINAL = "original_max_position_embeddings"
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


def context_of(config: Mapping[str, Any]) -> int:
    """The maximum context length in tokens. With YaRN (arXiv:2309.00071), the length before scaling times the factor,
    since many files give the length before scaling as their maximum."""
    values = (config.get(name) for name in CONTEXT)
    tokens = int(next((tokens for tokens in values if tokens is not None), DEFAULT_CONTEXT))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return tokens
    scaled = rope.get("factor"), rope.get(ORIGINAL) or config.get(ORIGINAL) or tokens
    numbers = [value for value in scaled if isinstance(value, int | float) and math.isfinite(value)]
    return int(math.prod(numbers)) if len(numbers) == len(scaled) else tokens


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
    if all(_is_whole(each) and -MAX_TOKEN_ID <= each <= MAX_TOKEN_ID for each in _listed_eos(config)):
        return None
    return f"eos_token_id must be a token id or a list of token ids (got {_shown(config['eos_token_id'])})"


def _listed_eos(config: Mapping[str, Any]) -> list[Any]:
    value = config.get("eos_token_id")
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except ValueError:
        # Python does not convert integers of thousands of digits.
        return "a very large integer"


def eos_token_ids(*configs: Mapping[str, Any]) -> list[int]:
    """The ids in these configurations: generation_config.json and config.json."""
    return [int(token) for config in configs for token in _listed_eos(config)]


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Model(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Tokenizer(msgspec.Struct, frozen=True):
    added_tokens: list[_AddedToken] = []
    model: _Model = _Model()


def tokenizer_eos(tokenizer_config: Mapping[str, Any], tokenizer_file: Path) -> int | None:
    """The id of `eos_token` in tokenizer_config.json, often the only file in which a chat model names its end of turn.

    None if it has no id. Raises msgspec.DecodeError, RecursionError.
    """
    token = tokenizer_config.get("eos_token")
    # Older checkpoints describe a token by an object with its text as "content".
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    tokenizer = msgspec.json.decode(tokenizer_file.read_bytes(), type=_Tokenizer)
    added = {entry.content: entry.id for entry in tokenizer.added_tokens}
    return added[text] if text in added else _in_vocabulary(tokenizer.model.vocab, text)


def _in_vocabulary(vocabulary: msgspec.Raw, text: str) -> int | None:
    tokens = msgspec.json.decode(vocabulary, type=dict[str, int] | list[tuple[str, float]])
    if isinstance(tokens, dict):
        return tokens.get(text)
    # Unigram models list pairs of a token and its score.
    return next((number for number, (token, _) in enumerate(tokens) if token == text), None)
