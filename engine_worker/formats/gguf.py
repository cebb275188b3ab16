"""The tensors of a GGUF file, by the names of the model's weights."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine_worker.formats.ggml import READERS
from engine_worker.formats.stored import Stored
from engine_worker.formats.weight import Place, Weight
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.gguf import TYPES, GgufError, GgufTensor, read_gguf

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
ROTATED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""Tensors whose rows are rotated by the position, and the metadata with their number of heads."""
LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
EXPERT_DIMENSIONS = 3
BLOCKS = "blocks"
"""The only part of a quantized matrix."""

T = TypeVar("T", Tensor, Stored)


class GgufFile:
    def __init__(self, file: Path) -> None:
        """Raises CheckpointError."""
        self._file = file
        try:
            self._header = read_gguf(file)
        except GgufError as error:
            raise CheckpointError(f"{file} {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        self._data = np.memmap(file, np.uint8, "r")

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """By the model's names; a tensor that is not known keeps its own."""
        for tensor in self._header.tensors:
            if tensor.name in IGNORED:
                continue
            base, _, end = tensor.name.rpartition(".")
            found = LAYER.fullmatch(base)
            layer, part = (found[1], found[2]) if found else ("", base)
            if part in NAMES and not found:
                yield f"{NAMES[part]}.{end}", self._weight(tensor)
            elif part in LAYER_NAMES:
                yield f"model.layers.{layer}.{LAYER_NAMES[part]}.{end}", self._weight(tensor)
            elif part in EXPERT_NAMES and len(tensor.shape) == EXPERT_DIMENSIONS:
                for expert in range(tensor.shape[0]):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{EXPERT_NAMES[part]}.{end}"
                    yield name, self._weight(tensor, expert)
            else:
                yield tensor.name, self._weight(tensor)

    def plain(self, place: Place) -> Tensor:
        """A tensor that is not quantized."""
        return self._in_order(place, self._bytes(place).view(DTYPES[place.type]).view(place.shape))

    def stored(self, name: str, place: Place, shape: tuple[int, int]) -> Stored:
        """The quantized matrix called `name`. Raises CheckpointError."""
        if place.shape != shape:
            raise CheckpointError(f"tensor {place.name} has shape {list(place.shape)}, {name} needs {list(shape)}")
        kind = next(each for each in TYPES.values() if each.name == place.type)
        blocks = self._bytes(place).view(shape[0], shape[1] // kind.width, kind.num_bytes)
        return self._in_order(place, READERS[place.type](blocks))

    def _weight(self, tensor: GgufTensor, matrix: int | None = None) -> Weight:
        shape, num_bytes = tensor.shape, tensor.num_bytes
        if matrix is not None:
            shape, num_bytes = shape[1:], num_bytes // shape[0]
        place = Place(self._file, tensor.name, tensor.type, shape, num_bytes, matrix)
        return Weight(place, {}) if tensor.type in DTYPES else Weight(None, {BLOCKS: place})

    def _bytes(self, place: Place) -> Tensor:
        """A copy: pages of the file would otherwise stay in memory."""
        start = self._tensors[place.name].start + (place.matrix or 0) * place.num_bytes
        return torch.from_numpy(np.array(self._data[start : start + place.num_bytes]))

    def _in_order(self, place: Place, value: T) -> T:
        """The rows as Hugging Face's models have them. llama.cpp rotates neighbouring rows of a head, where those
        rotate the first half of a head with the second; in the architecture llama, the file has its order."""
        part = place.name.split(".")[-2]
        if part not in ROTATED or self._header.fields.get("general.architecture") != "llama":
            return value
        heads = self._header.fields.get(f"llama.{ROTATED[part]}", self._header.fields["llama.attention.head_count"])
        index = torch.arange(place.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
        return value[index] if isinstance(value, Tensor) else value.rows(index)
