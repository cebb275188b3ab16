"""Read the quantized matrices of safetensors checkpoints into `Stored`.

Layouts: AWQ (AutoAWQ's gemm), GPTQ (AutoGPTQ, gptqmodel), compressed-tensors, FP8 (DeepSeek, fbgemm, ModelOpt), NVFP4,
bitsandbytes (in `bitsandbytes.py`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine_worker.formats import bitsandbytes
from engine_worker.formats.packing import WORD_BITS, pack_pairs, unpack_words
from engine_worker.formats.parts import Parts, part_of, shaped
from engine_worker.formats.stored import Stored
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.quantization import Quantization

AWQ_BITS = 4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output j of eight is in nibble AWQ_ORDER[j] of its word."""
FLOAT8 = {torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2"}
NVFP4_GROUP = 16
UNUSED = ("input_scale", "input_scale_ub", "input_global_scale", "weight_shape", "weight_format")
"""Activations are not quantized, so their scales are not needed; shapes follow from the model."""
PARTS = (
    "weight", "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv",
    "weight_scale_2", "weight_zero_point", "weight_global_scale", "weight_g_idx", "SCB",
    *bitsandbytes.NF4_PARTS, *UNUSED,
)  # fmt: skip
"""Last part of the name of each tensor that belongs to a matrix."""

Shape = tuple[int, int]


def is_quantized(types: Mapping[str, str]) -> bool:
    """types: of a weight's parts by name, as safetensors names them. False: it is a plain tensor."""
    return not types.keys() <= {"weight", ""} or types.get("weight", "F32").startswith(("F8", "I", "U"))


def read(parts: Parts, shape: Shape, quantization: Quantization) -> Stored:
    """The matrix [N, K] of these parts, named as in PARTS. Raises CheckpointError; the message continues the name of
    the module."""
    if "qweight" in parts:
        if quantization.method not in WORDS:
            raise CheckpointError(f"has a qweight, but its quant_method is {quantization.method!r}")
        return WORDS[quantization.method](parts, shape, quantization)
    if "weight_packed" in parts:
        is_nvfp4 = parts["weight_packed"].dtype == torch.uint8
        return _nvfp4_packed(parts, shape) if is_nvfp4 else _packed_words(parts, shape)
    weight = part_of(parts, "weight")
    if weight.dtype in FLOAT8:
        return _scaled(FLOAT8[weight.dtype], parts, shape, quantization)
    if weight.dtype == torch.uint8 and "weight_scale_2" in parts:
        scales = part_of(parts, "weight_scale").float() * part_of(parts, "weight_scale_2").float()
        return _nvfp4(weight, scales, shape)
    if weight.dtype == torch.int8 and "SCB" in parts:
        return bitsandbytes.read_int8(parts, shape)
    if weight.dtype == torch.uint8 and bitsandbytes.ABSMAX in parts:
        return bitsandbytes.read_nf4(parts, shape)
    if weight.dtype == torch.int8:
        return _scaled("i8", parts, shape, quantization)
    raise CheckpointError(
        f"has weights of type {weight.dtype} in an unknown format (parts: {', '.join(sorted(parts))})"
    )


def _awq(parts: Parts, shape: Shape, _quantization: Quantization) -> Stored:
    def outputs(words: Tensor) -> Tensor:
        """[R, N / 8] -> [R, N]"""
        eights = _unpacked(words, AWQ_BITS, shape[0]).view(len(words), -1, 8)
        return eights[:, :, AWQ_ORDER].flatten(1)

    if shape[0] % 8:
        raise CheckpointError(f"has {shape[0]} outputs, but AWQ packs them by eight")
    codes = outputs(shaped("qweight", parts["qweight"], (shape[1], shape[0] // 8))).T
    return _integers(AWQ_BITS, codes, part_of(parts, "scales").T, outputs(part_of(parts, "qzeros")).T, None)


def _gptq(parts: Parts, shape: Shape, quantization: Quantization) -> Stored:
    words = parts["qweight"]
    bits = _bits(words.shape[0], shape[1])
    codes = _unpacked(shaped("qweight", words, (words.shape[0], shape[0])).T.contiguous(), bits, shape[1])
    # The sum may need one bit more.
    zeros = _unpacked(part_of(parts, "qzeros"), bits, shape[0]).T.to(torch.int16) + quantization.zero_offset
    return _integers(bits, codes, part_of(parts, "scales").T, zeros, part_of(parts, "g_idx"))


def _packed_words(parts: Parts, shape: Shape) -> Stored:
    """compressed-tensors, pack-quantized."""
    words = parts["weight_packed"]
    bits = _bits(words.shape[1], shape[1])
    codes = _unpacked(shaped("weight_packed", words, (shape[0], words.shape[1])), bits, shape[1])
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        # Packed along the rows.
        zeros = _unpacked(zeros.T.contiguous(), bits, shape[0]).T
    order = parts.get("weight_g_idx")
    if order is not None and bool((order < 0).all()):
        order = None
    return _integers(bits, codes, part_of(parts, "weight_scale"), zeros, order)


WORDS = {"awq": _awq, "gptq": _gptq}
"""Readers of `qweight`, which two formats have, by method."""


def _integers(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None) -> Stored:
    """codes [N, K] unsigned; scales and zeros [N, K / group]; groups [K], the group of each input. Without zeros, and
    where all are in the middle of the range, codes become signed, the fastest type."""
    rows, columns = codes.shape
    middle = 1 << (bits - 1)
    if scales.dim() != 2 or scales.shape[0] != rows or not scales.numel() or columns % scales.shape[1]:
        raise CheckpointError(f"has scales of shape {list(scales.shape)}, which do not fit {rows} x {columns} codes")
    if zeros is not None and zeros.shape != scales.shape:
        raise CheckpointError(f"has zero points of shape {list(zeros.shape)} for {list(scales.shape)} scales")
    group = columns // scales.shape[1]
    order = None if groups is None else _order(groups, group, columns)
    if order is not None:
        codes = codes[:, order]
    symmetric = zeros is None or bool((zeros == middle).all())
    shifted = codes.to(torch.int8) - middle if bits < 8 else (codes.to(torch.int16) - middle).to(torch.int8)
    if bits <= 4:
        kind, codes = ("i4", pack_pairs(shifted)) if symmetric else ("u4", pack_pairs(codes))
    else:
        kind, codes = ("i8", shifted) if symmetric else ("u8", codes)
    points = None if symmetric or zeros is None else zeros.float().contiguous()
    return Stored(kind, codes.contiguous(), scales.float().contiguous(), points, group, order)


def _order(groups: Tensor, group: int, columns: int) -> Tensor | None:
    """The inputs sorted by group; None if they are in order."""
    in_order = torch.arange(columns) // group
    numbers = shaped("g_idx", groups.long(), (columns,))
    if torch.equal(numbers, in_order):
        return None
    order = torch.argsort(numbers, stable=True)
    if not torch.equal(numbers[order], in_order):
        raise CheckpointError(f"has a g_idx whose groups do not all have {group} inputs")
    return order


def _scaled(kind: str, parts: Parts, shape: Shape, quantization: Quantization) -> Stored:
    """One scale for the whole matrix, or for each row, group of columns, or block."""
    codes, columns = shaped("weight", parts["weight"], shape), shape[1]
    # "inv" is the inverse of what the weights were multiplied with, so both are multiplied.
    name = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    scales = part_of(parts, name).float()
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
    scales = scales.unsqueeze(1) if scales.dim() == 1 else scales
    group = columns
    if scales.dim() != 2 or not scales.numel():
        raise CheckpointError(f"has a {name} of shape {list(scales.shape)}, must have two dimensions")
    if scales.shape[1] != 1 or scales.shape[0] not in (1, shape[0]):
        scales, group = _by_row(name, scales, shape, quantization.block)
    scales = scales.expand(shape[0], -1).contiguous()
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = zeros.float().reshape(-1, scales.shape[1]).expand(scales.shape).contiguous() if zeros.any() else None
    return Stored(kind, codes, scales, zeros, group)


def _by_row(name: str, scales: Tensor, shape: Shape, block: tuple[int, int]) -> tuple[Tensor, int]:
    """Scales of groups or blocks, for each row, and the columns of a group. The last blocks may be incomplete."""
    if scales.shape[0] == shape[0] and shape[1] % scales.shape[1] == 0:
        return scales, shape[1] // scales.shape[1]
    if tuple(scales.shape) != tuple(-(-size // side) for size, side in zip(shape, block, strict=True)):
        raise CheckpointError(f"has a {name} of shape {list(scales.shape)}, which does not fit {list(shape)} weights")
    return scales.repeat_interleave(block[0], dim=0)[: shape[0]], block[1]


def _nvfp4_packed(parts: Parts, shape: Shape) -> Stored:
    # compressed-tensors' global scale divides; ModelOpt's `weight_scale_2` multiplies.
    scales = part_of(parts, "weight_scale").float() / part_of(parts, "weight_global_scale").float()
    return _nvfp4(parts["weight_packed"], scales, shape)


def _nvfp4(codes: Tensor, scales: Tensor, shape: Shape) -> Stored:
    if shape[1] % NVFP4_GROUP:
        raise CheckpointError(f"has {shape[1]} inputs, but NVFP4 has groups of {NVFP4_GROUP}")
    codes = shaped("weight", codes, (shape[0], shape[1] // 2))
    scales = shaped("weight_scale", scales, (shape[0], shape[1] // NVFP4_GROUP))
    return Stored("f4e2m1", codes, scales.contiguous(), None, NVFP4_GROUP)


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """See `unpack_words`."""
    if words.shape[-1] != -(-count * bits // WORD_BITS):
        raise CheckpointError(f"has {words.shape[-1]} words for {count} numbers of {bits} bits")
    return unpack_words(words, bits, count)


def _bits(words: int, numbers: int) -> int:
    """Bits of each of `numbers` numbers in as many words."""
    bits, rest = divmod(words * WORD_BITS, numbers)
    if rest or bits not in (2, 3, 4, 8):
        raise CheckpointError(f"has {words} words for {numbers} inputs, which is no whole number of bits that is known")
    return bits
