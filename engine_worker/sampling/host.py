"""Copies of tensors to the host."""

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> Tensor:
    """Start an asynchronous copy to pinned memory; it is complete once the device has done the work queued so far."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
