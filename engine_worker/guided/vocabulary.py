"""The tokenizer as llguidance needs it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLTokenizer

END = "<|end of guided text|>"


class Tokens(NamedTuple):
    tokenizer: LLTokenizer
    end: int
    """The id that stands for the end of the text in masks: one that the tokenizer does not have."""
    size: int
    special: frozenset[int]
    """Ids that never stand for text: where a mask has one, the grammar names it."""


def load_tokens(file: Path, vocab_size: int) -> Tokens:
    """`vocab_size`: of the model, whose ids without a token are never allowed. Raises ValueError."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    added = document.setdefault("added_tokens", [])
    vocab = document["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    end = 1 + max((*ids, *(token["id"] for token in added)))
    # With an end of its own, llguidance treats all of the model's tokens alike: special ones never stand for text, and
    # what ends a sequence is the request's to say.
    special = frozenset(token["id"] for token in added if token.get("special"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added.append({"id": end, "content": END, **flags})
    size = max(vocab_size, end + 1)
    return Tokens(LLTokenizer(json.dumps(document), n_vocab=size, eos_token=end), end, size, special)
