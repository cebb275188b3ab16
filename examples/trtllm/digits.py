"""Logits post-processors in a separate module, which the engine, another process, imports."""

import string
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sluice import tiny_model


@cache
def other_tokens() -> Tensor:
    """Whether each token of the tiny model is something other than a digit: [vocabulary]."""
    vocabulary = Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json")).get_vocab()
    others = torch.ones(len(vocabulary), dtype=torch.bool)
    others[[vocabulary[digit] for digit in string.digits]] = False
    return others


def only_digits(_request_id: int, logits: Tensor, token_ids: list[list[int]], *_: Any) -> None:
    """Allow only digits, and no digit twice in a row. `logits` [1, 1, vocabulary] are changed in place."""
    logits[..., other_tokens()] = -torch.inf
    logits[..., token_ids[0][-1]] = -torch.inf


def only_digits_batched(
    request_ids: list[int], logits: list[Tensor], token_ids: list[list[list[int]]], *_: Any
) -> None:
    """The same for all requests of a step."""
    for request in zip(request_ids, logits, token_ids, strict=True):
        only_digits(*request)
