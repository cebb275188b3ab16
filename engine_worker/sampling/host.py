"""Tensors on the host, and on their way there."""

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory that is under way: complete once the device has come so far."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
