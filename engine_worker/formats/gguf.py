"""The tensors of a GGUF file, by the names of the model's weights."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from engine_worker.formats.ggml import READERS
from engine_worker.formats.stored import Stored
from engine_worker.formats.weight import Place, Weight
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.gguf import TYPES, Gguf, GgufError, GgufTensor, read_header

PLAIN = ("F32", "F16", "BF16")
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors with a matrix of each expert."""
IGNORED = ("rope_freqs.weight",)
"""Factors of the rotary frequencies, which config.json's `rope_parameters` give."""
HEADS = "attention.head_count"
ROTATED = {"attn_q": HEADS, "attn_k": f"{HEADS}_kv"}
"""Tensors whose rows are rotated by the position, and the metadata with their number of heads."""
LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
EXPERT_DIMENSIONS = 3
BLOCKS = "blocks"
"""The only part of a quantized matrix."""

T = TypeVar("T", Tensor, Stored)


def gguf_weights(file: Path) -> Iterator[tuple[str, Weight]]:
    """By the model's names; a tensor that is not known keeps its own. Raises CheckpointError."""
    try:
        header = read_header(file)
    except GgufError as error:
        raise CheckpointError(f"{file} {error}") from error
    for tensor in header.tensors:
        if tensor.name in IGNORED:
            continue
        base, _, end = tensor.name.rpartition(".")
        found = LAYER.fullmatch(base)
        layer, part = (found[1], found[2]) if found else ("", base)
        place = Place(file, *tensor, heads=_heads(file, header, tensor, part))
        if part in NAMES and not found:
            yield f"{NAMES[part]}.{end}", _weight(place)
        elif part in LAYER_NAMES:
            yield f"model.layers.{layer}.{LAYER_NAMES[part]}.{end}", _weight(place)
        elif part in EXPERT_NAMES and len(tensor.shape) == EXPERT_DIMENSIONS:
            for expert, each in enumerate(_matrices(place)):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{EXPERT_NAMES[part]}.{end}", _weight(each)
        else:
            yield tensor.name, _weight(place)


def read_blocks(name: str, place: Place, raw: Tensor, shape: tuple[int, int]) -> Stored:
    """The quantized matrix called `name`, of these bytes. Raises CheckpointError."""
    if place.shape != shape:
        raise CheckpointError(f"tensor {place.name} has shape {list(place.shape)}, {name} needs {list(shape)}")
    kind = next(each for each in TYPES.values() if each.name == place.type)
    blocks = raw.view(shape[0], shape[1] // kind.width, kind.num_bytes)
    return in_order(place, READERS[place.type](blocks))


def in_order(place: Place, value: T) -> T:
    """The rows as Hugging Face's models have them. llama.cpp rotates neighbouring rows of a head, where those rotate
    the first half of a head with the second; in the architecture llama, the file has its order."""
    if place.heads is None:
        return value
    index = torch.arange(place.shape[0]).view(place.heads, -1, 2).transpose(1, 2).flatten()
    return value[index] if isinstance(value, Tensor) else value.rows(index)


def _heads(file: Path, header: Gguf, tensor: GgufTensor, part: str) -> int | None:
    """Of which `part` has the rows, if they are in llama.cpp's order. Raises CheckpointError."""
    if part not in ROTATED or header.fields.get("general.architecture") != "llama":
        return None
    count = header.fields.get(f"llama.{ROTATED[part]}", header.fields.get(f"llama.{HEADS}"))
    if not isinstance(count, int) or count < 1 or tensor.shape[0] % (2 * count):
        raise CheckpointError(
            f"{file}: tensor {tensor.name} has {tensor.shape[0]} rows, which are not those of {count!r:.80} heads "
            f"(llama.{ROTATED[part]}) of an even size"
        )
    return count


def _matrices(place: Place) -> Iterator[Place]:
    """The matrix of each expert."""
    count, *shape = place.shape
    size = place.num_bytes // count
    for expert in range(count):
        yield place._replace(shape=tuple(shape), start=place.start + expert * size, num_bytes=size)


def _weight(place: Place) -> Weight:
    return Weight(place, {}) if place.type in PLAIN else Weight(None, {BLOCKS: place})
