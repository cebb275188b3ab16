"""Triton kernels for paged adapters, as in Punica (arXiv:2310.18547). Arguments are the fields of `StepPages` and
`LinearTargets`.

Imports triton, so import this module only where Triton is installed.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.lora.paged import BLOCK, Add, LinearTargets, StepPages

TILE = 64
"""Inputs or outputs that are computed at a time."""


@triton.jit
def _shrink(
    x, arena, tables, order, adapters, sums, stride, page_size, num_adapters, max_pages, num_rows,
    INPUTS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows by the a of one page -> sums [targets, max_pages, rows, WIDTH] float32."""
    block, place, target = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page = tl.load(tables + (target * num_adapters + tl.load(adapters + block)) * max_pages + place).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, WIDTH)
    if page >= 0:
        tokens = tl.load(order + rows)
        total = tl.zeros((BLOCK, WIDTH), tl.float32)
        for start in range(0, INPUTS, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < INPUTS
            values = tl.load(
                x + tokens[:, None] * stride + at[None, :], mask=(tokens >= 0)[:, None] & inside[None, :], other=0.0
            )
            weights = tl.load(
                arena + page * page_size + ranks[None, :] * INPUTS + at[:, None],
                mask=(ranks < RANKS)[None, :] & inside[:, None],
                other=0.0,
            )
            total += tl.dot(values, weights, input_precision="ieee")
        tl.store(sums + ((target * max_pages + place) * num_rows + rows[:, None]) * WIDTH + ranks[None, :], total)


@triton.jit
def _expand(
    out, arena, tables, order, adapters, sums, spans, stride, page_size, num_adapters, max_pages, num_rows,
    INPUTS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply the sums of all pages by their b, and add the products to TILE outputs of a block of rows."""
    block, tile, target = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, size = tl.load(spans + 2 * target), tl.load(spans + 2 * target + 1)
    table = tables + (target * num_adapters + tl.load(adapters + block)) * max_pages
    rows = block * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, WIDTH)
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < size
    total = tl.zeros((BLOCK, TILE), tl.float32)
    for place in range(max_pages):
        page = tl.load(table + place).to(tl.int64)
        if page >= 0:
            factors = tl.load(sums + ((target * max_pages + place) * num_rows + rows[:, None]) * WIDTH + ranks[None, :])
            weights = tl.load(
                arena + page * page_size + RANKS * INPUTS + ranks[:, None] * size + at[None, :],
                mask=(ranks < RANKS)[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.dot(factors.to(arena.dtype.element_ty), weights, input_precision="ieee")
    tokens = tl.load(order + rows)
    mask = (tokens >= 0)[:, None] & inside[None, :]
    where = out + tokens[:, None] * stride + first + at[None, :]
    before = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    tl.store(where, (before + total).to(out.dtype.element_ty), mask=mask)


def bind(pages: StepPages, linear: LinearTargets) -> Add:
    """See `engine_worker.lora.paged.Kernel`."""
    return partial(_add, pages._replace(tables=pages.tables[linear.places]), linear)


def _add(pages: StepPages, linear: LinearTargets, x: Tensor, out: Tensor) -> None:
    """`pages`: has only the tables of this linear layer."""
    arena, tables, order, adapters, page_ranks = pages
    _, spans, widest = linear
    num_targets, num_adapters, max_pages = tables.shape
    inputs, rows, width = x.shape[1], len(order), max(16, triton.next_power_of_2(page_ranks))
    sums = torch.empty(num_targets, max_pages, rows, width, dtype=torch.float32, device=x.device)
    sizes = {"INPUTS": inputs, "RANKS": page_ranks, "WIDTH": width, "BLOCK": BLOCK, "TILE": TILE}
    blocks = rows // BLOCK
    _shrink[(blocks, max_pages, num_targets)](
        x, arena, tables, order, adapters, sums, x.stride(0), arena.stride(0), num_adapters, max_pages, rows, **sizes
    )
    _expand[(blocks, triton.cdiv(widest, TILE), num_targets)](
        out, arena, tables, order, adapters, sums, spans, out.stride(0), arena.stride(0), num_adapters, max_pages, rows,
        **sizes,
    )  # fmt: skip
