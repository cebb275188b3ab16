"""Tests a loaded module on a few tokens: whether it computes each token independently, as the engine requires."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.models.generic.interface import AttentionCall, attention_computed_by
from sluice.ring.checkpoint import CheckpointError

TOLERANCE = 0.02
"""Relative to the norm: far above the noise of bfloat16, far below the effect of a different token."""
NEAR = 7


def check(
    name: str,
    body: Callable[[Tensor, Tensor | None], Tensor],
    logits: Callable[[Tensor], Tensor],
    whole: Callable[[Tensor, Tensor], Tensor],
    context: int,
    pad: int | None,
    device: torch.device,
) -> None:
    """With attention replaced by something that stays within each token, a token's hidden state must depend on nothing
    but its id and its position, counted from 0; and the head after the body must give what the whole module gives.

    body: ids [T], positions [T] (None: the module counts them itself) -> hidden [T, hidden]. logits: hidden ->
    [T, vocab]. whole: ids, positions -> [T, vocab]. context: the longest the model supports. pad: an id that modules
    may treat specially, so it is not used. Raises CheckpointError.
    """
    near, far = min(NEAR, context - 1), context - 1
    numbers = [number for number in range(4) if number != pad][:3]
    ids, positions, first = (torch.tensor(each, device=device) for each in (numbers, (near, 0, far), (0, 1)))
    with attention_computed_by(_within_tokens):
        hidden = body(ids[:2], positions[:2])
        swapped = body(ids[[1, 0]], positions[[1, 0]]).flip(0)
        beside_others = body(ids[[2, 0]], positions[[2, 0]])[1:]
        differs = not _close(hidden, swapped) or not _close(hidden[:1], beside_others)
        if differs:
            raise CheckpointError(
                f"{name} mixes tokens outside attention (recurrence, convolution), or counts positions itself"
            )
        if not _close(body(ids[:2], first), body(ids[:2], None)):
            raise CheckpointError(f"{name} does not count positions from 0")
        if not _close(logits(hidden), whole(ids[:2], positions[:2])):
            raise CheckpointError(f"{name} does more than its head after its decoder")


def _within_tokens(call: AttentionCall) -> Tensor:
    """A mix of the token's own query, key and value, so that a change in any of them shows in the output."""
    heads = call.query.shape[1]
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (call.key, call.value))
    mixed = value + torch.tanh(call.query * key)[..., : value.shape[-1]]
    return mixed.transpose(1, 2).contiguous()


def _close(found: Tensor, expected: Tensor) -> bool:
    distance = torch.linalg.vector_norm(found.float() - expected.float(), dim=-1)
    return bool((distance <= TOLERANCE * torch.linalg.vector_norm(expected.float(), dim=-1)).all())
