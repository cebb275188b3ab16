"""The tokens that end a model's output."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


def eos_token_ids(*configs: Mapping[str, Any]) -> list[int]:
    """The ids in these configurations: generation_config.json and config.json."""
    entries = [config.get("eos_token_id") for config in configs]
    lists = [entry if isinstance(entry, list) else [entry] for entry in entries if entry is not None]
    return [int(token) for ids in lists for token in ids]


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Model(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Tokenizer(msgspec.Struct, frozen=True):
    added_tokens: list[_AddedToken] = []
    model: _Model = _Model()


def tokenizer_eos(tokenizer_config: Mapping[str, Any], tokenizer_file: Path) -> int | None:
    """The id of `eos_token` in tokenizer_config.json, where alone fine-tunes of chats may name the end of a turn.

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
