"""Logits post-processors in TensorRT-LLM's form, in a module of their own: the engine, another process, imports it."""

import string
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sluice import tiny_model


@cache
def other_tokens() -> Tensor:
    """[vocabulary]: whether a token of the tiny model is no digit."""
    vocabulary = Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json")).get_vocab()
    others = torch.ones(len(vocabulary), dtype=torch.bool)
    others[[vocabulary[digit] for digit in string.digits]] = False
    return others


def only_digits(_request_id: int, logits: Tensor, token_ids: list[list[int]], *_: Any) -> None:
    """logits: [1, 1, vocabulary], changed in place. Not the same digit twice in a row."""
    logits[..., other_tokens()] = -torch.inf
    logits[..., token_ids[0][-1]] = -torch.inf


def only_digits_batched(
    request_ids: list[int], logits: list[Tensor], token_ids: list[list[list[int]]], *_: Any
) -> None:
    """The same for all requests of a step at once."""
    for each in zip(request_ids, logits, token_ids, strict=True):
        only_digits(*each)
