"""A logits processor for the streams of the kill run."""

import torch


def no_repeats(_request_id: str, logits: torch.Tensor, token_ids: list[list[int]], *_: object) -> None:
    """None of the last eight tokens comes again: a function of the tokens so far, as a processor should be."""
    logits[0, 0, token_ids[0][-8:]] = -torch.inf
