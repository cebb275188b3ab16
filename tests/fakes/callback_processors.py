"""Logits processors whose effect depends on all tokens. Engines import them; clients pass them as callbacks."""

import torch


def steer(request_id, logits, token_ids, stream, client_id):
    """Raise the logits of a few tokens, chosen by the tokens so far."""
    (tokens,) = token_ids
    checksum = sum((i + 1) * token for i, token in enumerate(tokens))
    logits[0, 0, torch.tensor([checksum * i % logits.shape[-1] for i in range(1, 8)])] += 20.0


def steer_all(request_ids, logits, token_ids, stream, client_ids):
    """`steer` as a batched processor."""
    for request_id, its_logits, its_tokens, client_id in zip(request_ids, logits, token_ids, client_ids, strict=True):
        steer(request_id, its_logits, its_tokens, stream, client_id)
