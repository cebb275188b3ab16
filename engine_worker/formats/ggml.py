"""Read the blocks of GGUF files into `Stored`. A block is consecutive inputs of one row.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine_worker.formats.packing import pack_pairs
from engine_worker.formats.stored import Stored

GROUP = 32
"""Inputs that share a scale in most types."""
Q6_K_GROUP = 16


def _half(raw: Tensor, start: int) -> Tensor:
    """The float16 at this byte of each block, [N, blocks, 1] float32."""
    return raw[..., start : start + 2].contiguous().view(torch.float16).float()


def _split(raw: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return raw.reshape(*raw.shape[:-1], *sizes)


def _nibbles(raw: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] codes: all low nibbles, then all high ones."""
    return torch.cat((raw & 15, raw >> 4), dim=-1)


def _signed(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int8)


def _stored(kind: str, codes: Tensor, scales: Tensor, offsets: Tensor | None = None, group: int = GROUP) -> Stored:
    """The matrix codes * scales + offsets. codes [N, ...] with K values in each row; scales and offsets [N, ...] with
    K / group values."""
    codes, scales = codes.flatten(1), scales.flatten(1)
    zeros = None
    if offsets is not None:
        offsets = offsets.flatten(1)
        # A scale of 0 leaves the offset alone, which no finite zero point can express, except as (0 - -1) * offset.
        flat = scales == 0
        zeros = torch.where(flat, -1.0, -offsets / torch.where(flat, 1.0, scales))
        if flat.any():
            codes = codes.masked_fill(flat.repeat_interleave(group, dim=1), 0)
            scales = torch.where(flat, offsets, scales)
    packed = pack_pairs(codes) if kind in ("u4", "i4") else codes
    return Stored(kind, packed.contiguous(), scales.contiguous(), zeros, group)


def _q8_0(raw: Tensor) -> Stored:
    return _stored("i8", _signed(raw[..., 2:]), _half(raw, 0))


def _q4_0(raw: Tensor) -> Stored:
    # A code stands for itself minus 8, which as a number with a sign differs in the highest bit.
    return _stored("i4", _nibbles(raw[..., 2:]) ^ 8, _half(raw, 0))


def _q4_1(raw: Tensor) -> Stored:
    return _stored("u4", _nibbles(raw[..., 4:]), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Tensor) -> Stored:
    codes = _nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
    return _stored("i8", codes.to(torch.int8) - 16, _half(raw, 0))


def _q5_1(raw: Tensor) -> Stored:
    return _stored("u8", _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8]), _half(raw, 0), _half(raw, 2))


def _fifth_bits(raw: Tensor) -> Tensor:
    """[..., 4] bytes with a bit for each code -> [..., 32], each bit at the place of value 16."""
    return ((raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _q4_k(raw: Tensor) -> Stored:
    return _scaled_twice("u4", _nibbles(_split(raw[..., 16:], 4, 32)), raw)


def _q5_k(raw: Tensor) -> Stored:
    # [N, blocks, 8 groups, 32]
    low = _split(_nibbles(_split(raw[..., 48:], 4, 32)).flatten(-2), 8, 32)
    high = (raw[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    return _scaled_twice("u8", low | high << 4, raw)


def _scaled_twice(kind: str, codes: Tensor, raw: Tensor) -> Stored:
    """With the scales of the groups of a block, and what is subtracted from them, in units of the block's own scales:
    6 bits each, packed into the bytes from 4 to 16."""
    low, middle, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=-1)
    least = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=-1)
    return _stored(kind, codes, _half(raw, 0) * scales.float(), -_half(raw, 2) * least.float())


def _q6_k(raw: Tensor) -> Stored:
    # [N, blocks, 2 halves, 4 groups, 32]
    low = _split(_nibbles(_split(raw[..., :128], 2, 64)), 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (_split(raw[..., 128:192], 2, 1, 32) >> shifts) & 3
    codes = (low | high << 4).view(torch.int8) - 32
    scales = _signed(raw[..., 192:208]).float() * _half(raw, 208)
    return _stored("i8", codes, scales, group=Q6_K_GROUP)


READERS: Mapping[str, Callable[[Tensor], Stored]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""By type: [N, blocks, bytes of a block] uint8 -> the matrix."""
