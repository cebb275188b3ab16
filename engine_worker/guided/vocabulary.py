"""Loads the model's tokenizer for llguidance."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLTokenizer

END = "<|end of guided text|>"


class Tokens(NamedTuple):
    tokenizer: LLTokenizer
    end: int
    """The id that marks a complete output in masks: an additional one, which the model does not have."""
    size: int
    """Ids in a mask."""
    special: frozenset[int]
    """Ids of special tokens, which are never text: a mask allows one only where the grammar names it."""


def load_tokens(file: Path, vocab_size: int) -> Tokens:
    """`vocab_size`: the model's; ids without a token are never allowed. Raises ValueError."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    added = document.setdefault("added_tokens", [])
    vocab = document["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    end = 1 + max((*ids, *(token["id"] for token in added)))
    # With this additional end token llguidance treats all special tokens of the model alike, and the request decides
    # which ids end a sequence.
    special = frozenset(token["id"] for token in added if token.get("special"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added.append({"id": end, "content": END, **flags})
    size = max(vocab_size, end + 1)
    return Tokens(LLTokenizer(json.dumps(document), n_vocab=size, eos_token=end), end, size, special)
