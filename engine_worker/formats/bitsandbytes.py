"""Read the matrices of bitsandbytes: int8 with a scale per row, and nf4 in blocks of a row."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from engine_worker.formats.packing import swap_pairs
from engine_worker.formats.parts import Parts, numbers_of, part_of, shaped, typed
from engine_worker.formats.stored import BYTE_MAX, NORMAL4, Stored
from sluice.checkpoint.errors import CheckpointError

STATE = "weight.quant_state.bitsandbytes__nf4"
ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP = (
    f"weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
)
NF4_PARTS = (ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP, STATE, STATE.replace("nf4", "fp4"))
"""Ends of the names of tensors beside the codes."""
INT8_MAX = 127


def read_int8(parts: Parts, shape: tuple[int, int]) -> Stored:
    largest = shaped("SCB", numbers_of(parts, "SCB").flatten(), (shape[0],)).unsqueeze(1)
    return Stored("i8", shaped("weight", parts["weight"], shape), largest / INT8_MAX, None, shape[1])


def read_nf4(parts: Parts, shape: tuple[int, int]) -> Stored:
    """QLoRA (arXiv:2305.14314): blocks of the flattened matrix, whose largest values are quantized too."""
    if STATE not in parts:
        raise CheckpointError(f"has no {STATE}: of bitsandbytes' types with 4 bits only nf4 is supported")
    state = _state(parts[STATE])
    block, given = state.get("blocksize"), state.get("shape")
    if given != list(shape) or not isinstance(block, int) or block < 1:
        raise CheckpointError(f"has blocks of {block} in a matrix of shape {given}, the model needs {list(shape)}")
    if shape[1] % block or shape[1] % 2:
        raise CheckpointError(f"has {shape[1]} inputs, must be a multiple of its blocks of {block}, and even")
    table = numbers_of(parts, MAP).flatten()
    if len(table) != len(NORMAL4) or not torch.allclose(table, torch.tensor(NORMAL4), atol=1e-6):
        raise CheckpointError("has a quant_map that is not nf4's")
    scales, codes = _largest(parts, state), parts["weight"].flatten()
    if 2 * len(codes) != shape[0] * shape[1] or len(scales) * block != 2 * len(codes):
        raise CheckpointError(f"has {2 * len(codes)} codes and {len(scales)} scales for {list(shape)} weights")
    # The first of two codes is in the high bits.
    packed = swap_pairs(codes).view(shape[0], -1)
    return Stored("nf4", packed, scales.view(shape[0], -1).contiguous(), None, block)


def _largest(parts: Parts, state: Mapping[str, object]) -> Tensor:
    """The largest value of each block."""
    if (size := state.get("nested_blocksize")) is None:
        return numbers_of(parts, ABSMAX).flatten()
    absmax, offset = typed(ABSMAX, part_of(parts, ABSMAX), torch.uint8).flatten(), state.get("nested_offset", 0.0)
    scales, table = (numbers_of(parts, name).flatten() for name in (NESTED_ABSMAX, NESTED_MAP))
    if not isinstance(size, int) or not isinstance(offset, float | int) or len(scales) * size < len(absmax) or size < 1:
        raise CheckpointError(f"has {len(scales)} scales of blocks of {size} for {len(absmax)} scales")
    if len(table) <= BYTE_MAX:
        raise CheckpointError(f"has a nested_quant_map of {len(table)} values, must be {BYTE_MAX + 1}")
    return table[absmax.long()] * scales[torch.arange(len(absmax)) // size] + offset


def _state(text: Tensor) -> dict[str, object]:
    """A JSON object in the bytes of a tensor."""
    content = bytes(typed(STATE, text, torch.uint8).flatten().tolist())
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"has a {STATE} that is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"has a {STATE} that is not a JSON object")
    return state
