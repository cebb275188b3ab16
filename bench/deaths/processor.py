"""A logits processor for the streams of the kill run."""

import torch


def no_repeats(_request_id: str, logits: torch.Tensor, token_ids: list[list[int]], *_: object) -> None:
    """Excludes the last eight tokens. The result depends only on the tokens so far, as recovery requires."""
    logits[0, 0, token_ids[0][-8:]] = -torch.inf
