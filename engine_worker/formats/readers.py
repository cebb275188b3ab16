"""Read the quantized matrices of safetensors checkpoints into `Stored`.

Layouts: AWQ (AutoAWQ's gemm), GPTQ (AutoGPTQ, gptqmodel), compressed-tensors, FP8 (DeepSeek, fbgemm, ModelOpt), NVFP4,
MXFP4, MXFP6, MXFP8, bitsandbytes (in `bitsandbytes.py`).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engine_worker.formats import bitsandbytes
from engine_worker.formats.packing import WORD_BITS, pack_pairs, unpack_words, words_of
from engine_worker.formats.parts import Parts, matrix, number_of, numbers_of, part_of, shaped, typed
from engine_worker.formats.stored import Stored
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.quantization import Quantization

AWQ_BITS = 4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output j of eight is in nibble AWQ_ORDER[j] of its word."""
FLOAT8 = {torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2"}
NVFP4_GROUP = 16
MX_GROUP = 32
"""Inputs that share a scale in the Open Compute Project's microscaling formats."""
FLOAT6 = torch.tensor([*range(8), *(step << power for power in range(3) for step in range(8, 16))], dtype=torch.int8)
"""f6e2m3 without the sign, in eighths."""
GPTQ_BITS = (2, 3, 4, 8)
PACKED_BITS = range(1, 9)
UNUSED = ("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "weight_shape", "weight_format")
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
        is_float = parts["weight_packed"].dtype == torch.uint8
        return _packed_floats(parts, shape) if is_float else _packed_words(parts, shape, quantization)
    weight = part_of(parts, "weight")
    if weight.dtype in FLOAT8:
        return _scaled(FLOAT8[weight.dtype], parts, shape, quantization)
    if weight.dtype == torch.uint8 and "weight_scale_2" in parts:
        scales = numbers_of(parts, "weight_scale") * number_of(parts, "weight_scale_2")
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
    def outputs(name: str) -> Tensor:
        """[R, N / 8] -> [R, N]"""
        words = _words(parts, name)
        eights = _unpacked(name, words, AWQ_BITS, shape[0]).view(len(words), -1, 8)
        return eights[:, :, AWQ_ORDER].flatten(1)

    if shape[0] % 8:
        raise CheckpointError(f"has {shape[0]} outputs, but AWQ packs them by eight")
    shaped("qweight", parts["qweight"], (shape[1], shape[0] // 8))
    scales = matrix("scales", numbers_of(parts, "scales")).T
    return _integers(AWQ_BITS, outputs("qweight").T, scales, _group(scales, shape), outputs("qzeros").T, None)


def _gptq(parts: Parts, shape: Shape, quantization: Quantization) -> Stored:
    words = _words(parts, "qweight")
    bits, rest = divmod(words.shape[0] * WORD_BITS, shape[1])
    if rest or bits not in GPTQ_BITS:
        raise CheckpointError(f"has {words.shape[0]} words for {shape[1]} inputs, which are not 2, 3, 4 or 8 bits each")
    shaped("qweight", words, (words.shape[0], shape[0]))
    codes = _unpacked("qweight", words.T.contiguous(), bits, shape[1])
    # The sum may need one bit more.
    zeros = _unpacked("qzeros", _words(parts, "qzeros"), bits, shape[0]).T.to(torch.int16) + quantization.zero_offset
    scales = matrix("scales", numbers_of(parts, "scales")).T
    return _integers(bits, codes, scales, _group(scales, shape), zeros, part_of(parts, "g_idx"))


def _packed_words(parts: Parts, shape: Shape, quantization: Quantization) -> Stored:
    """compressed-tensors, pack-quantized."""
    words = _words(parts, "weight_packed")
    bits, padded = _packing(words.shape[1], shape[1], quantization.bits or PACKED_BITS)
    shaped("weight_packed", words, (shape[0], words.shape[1]))
    codes = _unpacked("weight_packed", words, bits, shape[1], padded)
    scales, group = _by_row("weight_scale", _scales(parts, "weight_scale"), shape, quantization)
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        # Packed along the rows.
        name = "weight_zero_point"
        zeros = _unpacked(name, matrix(name, zeros).T.contiguous(), bits, shape[0], padded).T
    elif zeros is not None:
        # Not packed, and signed, if there is one for the whole matrix or for each block.
        zeros = _by_row("weight_zero_point", zeros.float(), shape, quantization)[0] + (1 << (bits - 1))
    order = parts.get("weight_g_idx")
    if order is not None and bool((order < 0).any()):
        order = None
    return _integers(bits, codes, scales, group, zeros, order)


def _packing(words: int, inputs: int, bits: Iterable[int]) -> tuple[int, bool]:
    """Of `inputs` numbers in as many words: the bits of each, and whether words are padded, as before version 0.18."""
    found = [
        (each, padded)
        for each in bits
        # Otherwise both are the same.
        for padded in ((False, True) if WORD_BITS % each else (False,))
        if words == words_of(inputs, each, padded)
    ]
    if len(found) != 1:
        names = " or ".join(f"{each} bits{', padded' if padded else ''}" for each, padded in found)
        raise CheckpointError(f"has {words} words for {inputs} inputs, which may be {names or 'of no known size'}")
    return found[0]


WORDS = {"awq": _awq, "gptq": _gptq}
"""Readers of `qweight`, which two formats have, by method."""


def _group(scales: Tensor, shape: Shape) -> int:
    """Inputs that share a scale, of scales [N, K / group]."""
    if scales.shape[0] != shape[0] or shape[1] % scales.shape[1]:
        raise CheckpointError(
            f"has scales of shape {list(scales.T.shape)}, which do not fit {shape[1]} x {shape[0]} codes"
        )
    return shape[1] // scales.shape[1]


def _integers(
    bits: int, codes: Tensor, scales: Tensor, group: int, zeros: Tensor | None, groups: Tensor | None
) -> Stored:
    """codes [N, K] unsigned; scales and zeros [N, K / group]; groups [K], the group of each input. Without zeros, and
    where all are in the middle of the range, codes become signed, the fastest type. Those of an odd number of inputs,
    which are no whole pairs, are bytes."""
    middle = 1 << (bits - 1)
    if zeros is not None and zeros.shape != scales.shape:
        raise CheckpointError(f"has zero points of shape {list(zeros.shape)} for {list(scales.shape)} scales")
    order = None if groups is None else _order(groups, group, codes.shape[1])
    if order is not None:
        codes = codes[:, order]
    symmetric = zeros is None or bool((zeros == middle).all())
    shifted = codes.to(torch.int8) - middle if bits < 8 else (codes.to(torch.int16) - middle).to(torch.int8)
    if bits <= 4 and codes.shape[1] % 2 == 0:
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
    # "inv" is the inverse of what the weights were multiplied with, so both are multiplied.
    name = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    scales, group = _by_row(name, _scales(parts, name), shape, quantization)
    if parts[name].dtype == torch.uint8 and group != MX_GROUP:
        raise CheckpointError(f"has a {name} for groups of {group}, but microscaling formats have groups of {MX_GROUP}")
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros, _ = _by_row("weight_zero_point", zeros.float(), shape, quantization)
        zeros = shaped("weight_zero_point", zeros, tuple(scales.shape)) if zeros.any() else None
    return Stored(kind, shaped("weight", parts["weight"], shape), scales, zeros, group)


def _scales(parts: Parts, name: str) -> Tensor:
    """float32. Bytes are powers of two (E8M0)."""
    scales = part_of(parts, name)
    return numbers_of({name: scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales}, name)


def _by_row(name: str, numbers: Tensor, shape: Shape, quantization: Quantization) -> tuple[Tensor, int]:
    """Scales or zero points for each row and group of columns, and the columns of a group. `numbers`: one for the whole
    matrix, or for each row, group of columns, or block, of which the last ones may be incomplete."""
    (rows, columns), block = shape, quantization.block
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).repeat(rows, 1), columns
    numbers = matrix(name, numbers.unsqueeze(1) if numbers.dim() == 1 else numbers)
    if tuple(numbers.shape) == tuple(-(-size // side) for size, side in zip(shape, block, strict=True)):
        return numbers.repeat_interleave(block[0], dim=0)[:rows], block[1]
    if numbers.shape[0] != rows or columns % numbers.shape[1]:
        raise CheckpointError(f"has a {name} of shape {list(numbers.shape)}, which does not fit {list(shape)} weights")
    group = columns // numbers.shape[1]
    if quantization.groups and group not in (*quantization.groups, columns):
        sizes = " or ".join(map(str, quantization.groups))
        raise CheckpointError(
            f"has a {name} of shape {list(numbers.shape)}, so groups of {group} of its {columns} inputs, but groups of "
            f"{sizes} by its quantization_config"
        )
    return numbers.contiguous(), group


def _packed_floats(parts: Parts, shape: Shape) -> Stored:
    """compressed-tensors: NVFP4, MXFP4 or MXFP6."""
    codes, scales = matrix("weight_packed", parts["weight_packed"]), _scales(parts, "weight_scale")
    if parts["weight_scale"].dtype != torch.uint8:
        # This global scale divides; ModelOpt's `weight_scale_2` multiplies.
        return _nvfp4(codes, scales / number_of(parts, "weight_global_scale"), shape)
    if shape[1] % MX_GROUP:
        raise CheckpointError(f"has {shape[1]} inputs, but microscaling formats have groups of {MX_GROUP}")
    scales = shaped("weight_scale", scales, (shape[0], shape[1] // MX_GROUP))
    if codes.shape[1] == shape[1] // 2:
        return Stored("f4e2m1", shaped("weight_packed", codes, (shape[0], shape[1] // 2)), scales, None, MX_GROUP)
    # Groups of 32 numbers of 6 bits are whole words; a copy, since bytes may begin anywhere in a file. All values are
    # integers, of eighths.
    words = shaped("weight_packed", codes, (shape[0], shape[1] * 6 // 8)).clone().view(torch.int32)
    numbers = unpack_words(words, 6, shape[1])
    sizes = FLOAT6[(numbers & 31).long()]
    return Stored("i8", torch.where(numbers < 32, sizes, -sizes), scales / 8, None, MX_GROUP)


def _nvfp4(codes: Tensor, scales: Tensor, shape: Shape) -> Stored:
    if shape[1] % NVFP4_GROUP:
        raise CheckpointError(f"has {shape[1]} inputs, but NVFP4 has groups of {NVFP4_GROUP}")
    codes = shaped("weight", codes, (shape[0], shape[1] // 2))
    scales = shaped("weight_scale", scales, (shape[0], shape[1] // NVFP4_GROUP))
    return Stored("f4e2m1", codes, scales.contiguous(), None, NVFP4_GROUP)


def _words(parts: Parts, name: str) -> Tensor:
    return matrix(name, typed(name, part_of(parts, name), torch.int32))


def _unpacked(name: str, words: Tensor, bits: int, count: int, padded: bool = False) -> Tensor:
    """See `unpack_words`."""
    if words.shape[-1] != words_of(count, bits, padded):
        raise CheckpointError(f"has a {name} of {words.shape[-1]} words for {count} numbers of {bits} bits")
    return unpack_words(words, bits, count, padded)
