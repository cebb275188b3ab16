"""Logits post-processors in TensorRT-LLM's form, for the engine to import."""

import time

import torch

SLOW_SECONDS = 0.02


def only_42(request_id, logits, token_ids, stream, client_id):
    logits[:] = -torch.inf
    logits[..., 42] = client_id - 123


def slow(request_id, logits, token_ids, stream, client_id):
    """Delay each step, so that a long request takes tens of seconds on any machine."""
    time.sleep(SLOW_SECONDS)


def only_43(request_ids, logits_batch, token_ids_batch, stream, client_ids):
    for logits in logits_batch:
        logits[:] = -torch.inf
        logits[..., 43] = 0
