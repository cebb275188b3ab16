"""Keys and values into their slots by Triton against torch: the engine takes torch's way where Triton's is wrong."""

from collections.abc import Sequence

import torch

from bench.gpu.findings import Check, Skip
from engine_worker.attention.backend import HeadShape
from engine_worker.attention.paged import Store, triton_store
from engine_worker.attention.trial import verify_store

TITLE = "Triton's store"
NAME = f"{TITLE} = torch's"


def check(heads: Sequence[HeadShape], dtype: torch.dtype, device: torch.device) -> Check:
    """Raises Skip where there is no Triton or no GPU, and what `compare` raises."""
    if device.type == "cpu":
        raise Skip("it needs a CUDA device")
    try:
        store = triton_store()
    except ModuleNotFoundError as error:
        raise Skip(str(error)) from error
    return compare(store, heads, dtype, device)


def compare(store: Store, heads: Sequence[HeadShape], dtype: torch.dtype, device: torch.device) -> Check:
    """For each of the heads. Raises RefusedError where it is wrong, and whatever it raises."""
    for one in heads:
        verify_store(store, one, dtype, device)
    return Check(NAME, passed=True, detail=f"{len(heads)} shapes of heads")
