"""Triton implementations of `FusedKernels`. This module imports triton, so import it only where the kernels are used.

Each kernel replaces a few torch operations by one launch, and rounds to x's dtype wherever they do. dtypes: float16,
bfloat16 or float32, the same for all tensors of a call; arithmetic is float32. T tokens, H heads of dimension D.

| kernel | inputs | output | grid | source |
| --- | --- | --- | --- | --- |
| `_norm` | x, update [T, SIZE], weight [SIZE] | [T, SIZE] | T | RMSNorm (arXiv:1910.07467) |
| `_rotate` | x [T, H, D], cos, sin [T, 1, D], weight [H, D] | [T, H, D] | T, H / GROUP | RoPE (arXiv:2104.09864) |
| `_gate` | x [T, 2 * SIZE] | [T, SIZE] | T, SIZE / TILE | SwiGLU (arXiv:2002.05202) |
| `_product` | x [1, inputs], weight [outputs, inputs] | [1, outputs] | outputs / ROWS | |

Quotients of the grid are rounded up. Tensors are contiguous, except x of `_rotate`: a token's heads are contiguous, the
stride between tokens is free, so x can be a view of a fused QKV product. `sin` is signed, see `Rotary`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.layers.layer import FusedKernels

TILE = 1 << 10
"""Elements per program of `_rotate` and `_gate`."""
PRODUCT_TILE = 1 << 11
"""Weights that a program of `_product` reads per iteration: those of one output, or of two if there are few inputs."""


@triton.jit
def _norm(x, update, weight, out, eps, ADDED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """One row per program: RMSNorm of x. If ADDED, x += update first, in place. Rounds to x's dtype where torch's
    operations would: after the addition, and before the product with the weight. WIDTH: SIZE rounded up to a power of
    two."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    row = tl.load(x + start + at, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(update + start + at, mask=inside, other=0.0)
        row = (row.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + start + at, row, mask=inside)
    values = row.to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    values = values.to(x.dtype.element_ty).to(tl.float32) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    x, cos, sin, weight, out, stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one token per program: an RMSNorm per head if NORMED, then the rotation. `near` is each element of
    a head, `far` its rotation partner half a head away. `stride`: elements between tokens of x. DIMS: HEAD_DIM rounded
    up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    at = tl.arange(0, DIMS)[None, :]
    across = tl.where(at < HEAD_DIM // 2, at + HEAD_DIM // 2, at - HEAD_DIM // 2)
    inside = (head < HEADS) & (at < HEAD_DIM)
    rows = x + token * stride + head * HEAD_DIM
    near = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    far = tl.load(rows + across, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(near * near, 1) / HEAD_DIM + eps)[:, None]
        weights = weight + head * HEAD_DIM
        near = (near * scale).to(x.dtype.element_ty).to(tl.float32)
        near = near * tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
        near = near.to(x.dtype.element_ty).to(tl.float32)
        far = (far * scale).to(x.dtype.element_ty).to(tl.float32)
        far = far * tl.load(weights + across, mask=inside, other=0.0).to(tl.float32)
        far = far.to(x.dtype.element_ty).to(tl.float32)
    cosines = tl.load(cos + token * HEAD_DIM + at, mask=at < HEAD_DIM, other=0.0).to(tl.float32)
    sines = tl.load(sin + token * HEAD_DIM + at, mask=at < HEAD_DIM, other=0.0).to(tl.float32)
    rotated = (near * cosines).to(x.dtype.element_ty).to(tl.float32) + far * sines
    tl.store(out + (token * HEADS + head) * HEAD_DIM + at, rotated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(x, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """TILE elements of one row per program: silu(gates) * values. A row of x is SIZE gates, then SIZE values."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    gates = tl.load(x + 2 * row + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + 2 * row + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    opened = (gates / (1.0 + tl.exp(-gates))).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row + at, (opened * values).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["outputs"])
def _product(x, weight, out, inputs, outputs, ROWS: tl.constexpr, TILE: tl.constexpr):
    """ROWS outputs per program: x Wᵀ for a single row x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, TILE)
    start = weight + row.to(tl.int64)[:, None] * inputs
    total = tl.zeros((ROWS, TILE), tl.float32)
    for begin in range(0, inputs, TILE):
        inside = begin + at < inputs
        values = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32)
        # Each weight is read once per step: do not let it displace other data from the cache.
        weights = tl.load(
            start + (begin + at)[None, :], mask=inside[None, :] & (row < outputs)[:, None], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        total += weights.to(tl.float32) * values[None, :]
    tl.store(out + row, tl.sum(total, 1).to(out.dtype.element_ty), mask=row < outputs)


def norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, size = x.shape
    out = torch.empty_like(x)
    width = triton.next_power_of_2(size)
    added = x if update is None else update.contiguous()
    flags = {"ADDED": update is not None, "SIZE": size, "WIDTH": width}
    _norm[(rows,)](x, added, weight, out, eps, **flags, num_warps=min(16, max(4, width // 512)))
    return out


def rotate(x: Tensor, rotations: tuple[Tensor, Tensor], weight: Tensor | None, eps: float) -> Tensor:
    tokens, heads, head_dim = x.shape
    out = torch.empty((tokens, heads, head_dim), dtype=x.dtype, device=x.device)
    dims = triton.next_power_of_2(head_dim)
    group = max(1, min(TILE // dims, triton.next_power_of_2(heads)))
    _rotate[(tokens, triton.cdiv(heads, group))](
        x, *rotations, x if weight is None else weight, out, x.stride(0), eps,
        HEADS=heads, HEAD_DIM=head_dim, DIMS=dims, GROUP=group, NORMED=weight is not None,
    )  # fmt: skip
    return out


def gate(x: Tensor) -> Tensor:
    rows, size = len(x), x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    _gate[(rows, triton.cdiv(size, TILE))](x, out, SIZE=size, TILE=TILE)
    return out


def product(x: Tensor, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    rows = 1 if inputs >= PRODUCT_TILE else 2
    _product[(triton.cdiv(outputs, rows),)](
        x.contiguous(), weight, out, inputs, outputs, ROWS=rows, TILE=PRODUCT_TILE // rows, num_warps=8
    )
    return out


KERNELS = FusedKernels(norm, rotate, gate, product)
