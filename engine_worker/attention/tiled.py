"""Attention by Sluice's own Triton kernels: pages of any size, any type, no package but what comes with torch."""

import torch

from engine_worker.attention.paged import Attend, Kernel


def _triton() -> Attend:
    from engine_worker.attention.kernels import attend

    return attend


KERNEL = Kernel(
    "triton",
    "Triton",
    _triton,
    frozenset({8, 9, 10, 11, 12}),
    tokens_per_block=1,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_dims=range(1, 257),
)
