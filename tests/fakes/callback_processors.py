"""Logits processors that depend on all tokens, for the engine to import and for programs to call themselves."""

import torch


def steer(request_id, logits, token_ids, stream, client_id):
    """Raises the logits of a few tokens, chosen by the tokens so far."""
    (tokens,) = token_ids
    chosen = sum((i + 1) * token for i, token in enumerate(tokens))
    logits[0, 0, torch.tensor([chosen * i % logits.shape[-1] for i in range(1, 8)])] += 20.0


def steer_all(request_ids, logits, token_ids, stream, client_ids):
    for each in zip(request_ids, logits, token_ids, client_ids, strict=True):
        steer(*each[:3], stream, each[3])
