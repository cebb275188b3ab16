"""Matrices packed by hand, with plain loops after each format's published layout, and what they mean."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WORD = 32
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in each nibble of a word."""
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT6 = (*(m / 8 for m in range(8)), *((1 + m / 8) * 2**e for e in range(3) for m in range(8)))


class Packed(NamedTuple):
    parts: dict[str, Tensor]
    dense: Tensor
    """[N, K] float32."""


def words(numbers: Sequence[int], bits: int, padded: bool = False) -> list[int]:
    """One stream of bits, the lowest first, as signed 32-bit words. padded: of each word as many as it has whole."""
    if padded:
        count = WORD // bits
        return [words(numbers[i : i + count], bits)[0] for i in range(0, len(numbers), count)]
    stream = sum(number << bits * place for place, number in enumerate(numbers))
    count = -(-len(numbers) * bits // WORD)
    unsigned = [stream >> WORD * i & 0xFFFFFFFF for i in range(count)]
    return [word - (1 << WORD) if word >> (WORD - 1) else word for word in unsigned]


def integers(matrix: Tensor, bits: int, group: int, symmetric: bool) -> tuple[list, Tensor, list, Tensor]:
    """Codes [N][K], scales [N, K / group] float16, zeros [N][K / group], and what they mean."""
    rows, columns = matrix.shape
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    codes = [[0] * columns for _ in range(rows)]
    scales = torch.zeros(rows, columns // group, dtype=torch.float16)
    zeros = [[middle] * (columns // group) for _ in range(rows)]
    dense = torch.zeros(rows, columns)
    for n in range(rows):
        for g in range(columns // group):
            values = matrix[n, g * group : (g + 1) * group]
            span = 2 * values.abs().max() if symmetric else values.max() - values.min()
            scales[n, g] = span / top
            scale = float(scales[n, g])
            if not symmetric:
                zeros[n][g] = min(max(round(-float(values.min()) / scale), 1), top)
            for k in range(group):
                code = min(max(round(float(values[k]) / scale) + zeros[n][g], 0), top)
                codes[n][g * group + k] = code
                dense[n, g * group + k] = (code - zeros[n][g]) * torch.tensor(scale)
    return codes, scales, zeros, dense


def awq(matrix: Tensor, group: int = 16) -> Packed:
    codes, scales, zeros, dense = integers(matrix, 4, group, symmetric=False)

    def pack(numbers: list[list[int]]) -> Tensor:
        """[R][N] -> [R, N / 8]"""
        packed = [
            [words([row[8 * word + output] for output in AWQ_OUTPUTS], 4)[0] for word in range(len(row) // 8)]
            for row in numbers
        ]
        return torch.tensor(packed, dtype=torch.int32)

    parts = {"qweight": pack(transposed(codes)), "qzeros": pack(transposed(zeros)), "scales": scales.T.contiguous()}
    return Packed(parts, dense)


def gptq(
    matrix: Tensor, group: int = 16, bits: int = 4, symmetric: bool = True, shift: int = 1, act_order: bool = False
) -> Packed:
    """shift: how much less the stored zero points are. act_order: inputs are sorted by importance, here at random."""
    columns = matrix.shape[1]
    order = np.random.default_rng(0).permutation(columns) if act_order else np.arange(columns)
    codes, scales, zeros, dense = integers(matrix[:, order], bits, group, symmetric)
    original = np.argsort(order)
    codes = [[row[k] for k in original] for row in codes]
    stored = [[zero - shift for zero in row] for row in transposed(zeros)]
    parts = {
        # Packed along the inputs, and the zero points along the outputs.
        "qweight": torch.tensor([words(row, bits) for row in codes], dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor([words(row, bits) for row in stored], dtype=torch.int32),
        "scales": scales.T.contiguous(),
        "g_idx": torch.tensor(original // group, dtype=torch.int32),
    }
    return Packed(parts, dense[:, original])


def pack_quantized(
    matrix: Tensor,
    group: int = 16,
    bits: int = 4,
    symmetric: bool = True,
    padded: bool = False,
    act_order: bool = False,
) -> Packed:
    """compressed-tensors. padded: as before its version 0.18."""
    columns = matrix.shape[1]
    order = np.random.default_rng(0).permutation(columns) if act_order else np.arange(columns)
    original = np.argsort(order)
    codes, scales, zeros, _ = integers(matrix[:, order], bits, group, symmetric)
    parts = {
        "weight_packed": torch.tensor(
            [words([row[k] for k in original], bits, padded) for row in codes], dtype=torch.int32
        ),
        "weight_scale": scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        packed = [words(row, bits, padded) for row in transposed(zeros)]
        parts["weight_zero_point"] = torch.tensor(packed, dtype=torch.int32).T.contiguous()
    if act_order:
        parts["weight_g_idx"] = torch.tensor(original // group, dtype=torch.int32)
    # The scales are rounded once more.
    spread = parts["weight_scale"].float().repeat_interleave(group, dim=1)
    centred = torch.tensor(codes) - torch.tensor(zeros).repeat_interleave(group, dim=1)
    return Packed(parts, (centred * spread)[:, original])


def fp8(matrix: Tensor, rows: int, columns: int, name: str = "weight_scale_inv") -> Packed:
    """A scale for each block of these sizes, of which the last ones may be incomplete."""
    codes, dense = torch.zeros(matrix.shape, dtype=torch.float8_e4m3fn), torch.zeros(matrix.shape)
    counts = [-(-size // side) for size, side in zip(matrix.shape, (rows, columns), strict=True)]
    scales = torch.zeros(counts)
    for i in range(counts[0]):
        for j in range(counts[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = matrix[block].abs().max() / 448
            codes[block] = (matrix[block] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[block] = codes[block].float() * scales[i, j]
    return Packed({"weight": codes, name: scales}, dense)


def fp8_tensor(matrix: Tensor) -> Packed:
    """One scale, and one of the static activations."""
    packed = fp8(matrix, *matrix.shape, name="weight_scale")
    scale = packed.parts["weight_scale"].reshape(())
    return Packed(packed.parts | {"weight_scale": scale, "input_scale": torch.tensor(0.5)}, packed.dense)


def fp8_rows(matrix: Tensor) -> Packed:
    return fp8(matrix, 1, matrix.shape[1], name="weight_scale")


def int8_rows(matrix: Tensor) -> Packed:
    """compressed-tensors, int-quantized."""
    scales = matrix.abs().amax(dim=1, keepdim=True) / 127
    codes = (matrix / scales).round().to(torch.int8)
    return Packed({"weight": codes, "weight_scale": scales}, codes.float() * scales)


def int8_bitsandbytes(matrix: Tensor) -> Packed:
    largest = matrix.abs().amax(dim=1)
    codes = (matrix * 127 / largest.unsqueeze(1)).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Packed(parts, codes.float() * (largest / 127).unsqueeze(1))


def nf4_bitsandbytes(matrix: Tensor, nested: bool) -> Packed:
    """Blocks of 32 of the flattened matrix. nested: their largest values are quantized in blocks of 4."""
    table = torch.tensor(NF4)
    values = matrix.flatten()
    count = len(values) // 32
    largest = torch.stack([values[32 * i : 32 * i + 32].abs().max() for i in range(count)])
    parts: dict[str, Tensor] = {"quant_map": table, "absmax": largest}
    state: dict[str, object] = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(matrix.shape)}
    if nested:
        offset, levels = 1.5, torch.linspace(-1, 1, 256)
        scales = torch.stack([(largest[i : i + 4] - offset).abs().max() for i in range(0, count, 4)])
        codes = torch.stack([(levels - (largest[i] - offset) / scales[i // 4]).abs().argmin() for i in range(count)])
        parts |= {"absmax": codes.to(torch.uint8), "nested_absmax": scales, "nested_quant_map": levels}
        state |= {"nested_blocksize": 4, "nested_offset": offset}
        largest = torch.stack([levels[codes[i]] * scales[i // 4] + offset for i in range(count)])
    indices = [int((table - value / largest[i // 32]).abs().argmin()) for i, value in enumerate(values)]
    dense = torch.stack([table[index] * largest[i // 32] for i, index in enumerate(indices)]).view(matrix.shape)
    packed = [indices[i] << 4 | indices[i + 1] for i in range(0, len(indices), 2)]
    parts["quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    named = {f"weight.{name}": part for name, part in parts.items()}
    return Packed({"weight": torch.tensor(packed, dtype=torch.uint8).unsqueeze(1), **named}, dense)


def nvfp4(matrix: Tensor, divides: bool) -> Packed:
    """divides: compressed-tensors, whose global scale divides; otherwise ModelOpt, whose second scale multiplies."""
    rows, columns = matrix.shape
    overall = torch.tensor(float(matrix.abs().max()) / (448 * 6))
    scales = torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn)
    codes, dense = torch.zeros(rows, columns // 2, dtype=torch.uint8), torch.zeros(rows, columns)
    second = 1 / overall if divides else overall
    for n in range(rows):
        for g in range(columns // 16):
            values = matrix[n, 16 * g : 16 * (g + 1)]
            scales[n, g] = values.abs().max() / 6 / overall
            scale = scales[n, g].float() / second if divides else scales[n, g].float() * second
            for k in range(16):
                size = abs(float(values[k] / scale))
                code = min(range(8), key=lambda i: abs(FLOAT4[i] - size))
                sign = -1.0 if values[k] < 0 else 1.0
                column = 16 * g + k
                codes[n, column // 2] |= (code | (8 if sign < 0 else 0)) << 4 * (column % 2)
                dense[n, column] = sign * FLOAT4[code] * scale
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    return Packed({names[0]: codes, "weight_scale": scales, names[1]: second}, dense)


def microscaling(matrix: Tensor, bits: int) -> Packed:
    """MXFP4, MXFP6 (e2m3) or MXFP8 (e4m3): 32 inputs share a scale, a power of two."""
    rows, columns = matrix.shape
    largest = {4: 6.0, 6: 7.5, 8: 448.0}[bits]
    exponents = torch.zeros(rows, columns // 32, dtype=torch.uint8)
    codes, dense = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(rows, columns)
    for n in range(rows):
        for g in range(columns // 32):
            block = slice(32 * g, 32 * (g + 1))
            power = math.ceil(math.log2(float(matrix[n, block].abs().max()) / largest))
            exponents[n, g] = power + 127
            values = matrix[n, block] / 2.0**power
            if bits == 8:
                numbers = values.to(torch.float8_e4m3fn)
                codes[n, block], dense[n, block] = numbers.view(torch.uint8), numbers.float() * 2.0**power
                continue
            table = torch.tensor(FLOAT4 if bits == 4 else FLOAT6)
            indices = (values.abs().unsqueeze(1) - table).abs().argmin(dim=1)
            sign = values < 0
            codes[n, block] = indices + (sign << (bits - 1))
            dense[n, block] = torch.where(sign, -table[indices], table[indices]) * 2.0**power
    if bits == 8:
        return Packed({"weight": codes.view(torch.float8_e4m3fn), "weight_scale": exponents}, dense)
    streams = [sum(code << bits * k for k, code in enumerate(row)) for row in codes.tolist()]
    packed = [list(stream.to_bytes(columns * bits // 8, "little")) for stream in streams]
    return Packed({"weight_packed": torch.tensor(packed, dtype=torch.uint8), "weight_scale": exponents}, dense)


def transposed(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


class Format(NamedTuple):
    pack: Callable[[Tensor], Packed]
    config: dict[str, object]
    """quantization_config."""


CT = "compressed-tensors"


def pack_config(bits: int) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int"}
    return {"quant_method": CT, "format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}


FORMATS = {
    "AWQ": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "GPTQ": Format(gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "GPTQ, 3 bits": Format(lambda m: gptq(m, bits=3, symmetric=False), {"quant_method": "gptq", "bits": 3}),
    "GPTQ, 2 bits": Format(lambda m: gptq(m, bits=2, symmetric=False), {"quant_method": "gptq", "bits": 2}),
    "GPTQ, 8 bits": Format(lambda m: gptq(m, bits=8), {"quant_method": "gptq", "bits": 8}),
    "GPTQ, act-order": Format(
        lambda m: gptq(m, symmetric=False, act_order=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}
    ),
    "GPTQ v2": Format(
        lambda m: gptq(m, symmetric=False, shift=0), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    ),
    "compressed-tensors, 4 bits": Format(pack_quantized, pack_config(4)),
    "compressed-tensors, 4 bits with zeros": Format(lambda m: pack_quantized(m, symmetric=False), pack_config(4)),
    "compressed-tensors, 8 bits": Format(lambda m: pack_quantized(m, bits=8), pack_config(8)),
    "compressed-tensors, act-order": Format(
        lambda m: pack_quantized(m, symmetric=False, act_order=True), pack_config(4)
    ),
    "compressed-tensors, int8": Format(int8_rows, {"quant_method": CT, "format": "int-quantized"}),
    "compressed-tensors, FP8": Format(fp8_rows, {"quant_method": CT, "format": "float-quantized"}),
    "compressed-tensors, NVFP4": Format(
        lambda m: nvfp4(m, divides=True), {"quant_method": CT, "format": "nvfp4-pack-quantized"}
    ),
    "compressed-tensors, MXFP4": Format(
        lambda m: microscaling(m, 4), {"quant_method": CT, "format": "mxfp4-pack-quantized"}
    ),
    "FP8, blocks": Format(lambda m: fp8(m, 32, 24), {"quant_method": "fp8", "weight_block_size": [32, 24]}),
    "FP8, large blocks": Format(lambda m: fp8(m, 128, 128), {"quant_method": "fp8"}),
    "ModelOpt, FP8": Format(fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "ModelOpt, NVFP4": Format(lambda m: nvfp4(m, divides=False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "bitsandbytes, nf4": Format(
        lambda m: nf4_bitsandbytes(m, nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bitsandbytes, nf4, nested": Format(
        lambda m: nf4_bitsandbytes(m, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bitsandbytes, int8": Format(int8_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
VARIANTS = {
    **{
        f"compressed-tensors, {bits} bits{', padded' if padded else ''}": Format(
            partial(pack_quantized, bits=bits, symmetric=False, padded=padded), pack_config(bits)
        )
        for bits in (3, 5, 6, 7)
        for padded in (False, True)
    },
    "compressed-tensors, MXFP6": Format(
        lambda m: microscaling(m, 6), {"quant_method": CT, "format": "mxfp6-pack-quantized"}
    ),
    "compressed-tensors, MXFP8": Format(
        lambda m: microscaling(m, 8), {"quant_method": CT, "format": "mxfp8-quantized"}
    ),
}
"""Whose `Stored` are of the kinds of FORMATS."""
