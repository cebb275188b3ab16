"""Reads an adapter from the two files that peft saves, and validates it against the model.

The files come from users: sizes are checked against limits that follow from the model before anything is parsed, and
weights are only read from safetensors.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.layers.adapters import Target
from engine_worker.lora.adapter_config import AdapterConfig, AdapterError, shown
from engine_worker.lora.tensor_file import MAX_HEADER_BYTES, read_matrices
from sluice.checkpoint.peft import CONFIG, PICKLE, WEIGHTS
from sluice.checkpoint.tensor_file import TensorFileError
from sluice.wire.adapters import MAX_CONFIG_BYTES, MAX_FILE_BYTES, AdapterFiles, Data

WRAPPER = "base_model.model."
"""Prefix of all tensor names, by peft."""
DECODERS = ("language_model.model.", "model.language_model.", "model.")
"""Prefixes that follow: the decoder of a vision-language model, in older and newer versions of transformers, or of a
text model."""
SIDES = ("lora_A", "lora_B")
TENSOR = re.compile(r"(?P<path>layers\.\d{1,5}\.\w{1,32}\.\w{1,32})\.(?P<side>lora_[AB])\.weight", re.ASCII)


class ModuleWeights(NamedTuple):
    """The low-rank matrices that an adapter adds to one linear map: x a^T b, with x [T, inputs]."""

    target: Target
    a: Tensor
    """[r, inputs of the whole map], contiguous."""
    b: Tensor
    """[r, outputs of the whole map], contiguous, multiplied by the scaling."""

    @property
    def rank(self) -> int:
        return len(self.a)


class AdapterWeights(NamedTuple):
    modules: tuple[ModuleWeights, ...]
    """In the order of the model's targets; at least one."""

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(module.rank for module in self.modules)

    @property
    def nbytes(self) -> int:
        return sum(module.a.nbytes + module.b.nbytes for module in self.modules)

    def num_pages(self, page_ranks: int) -> int:
        return sum(-(-module.rank // page_ranks) for module in self.modules)


def read_files(folder: Path, targets: Iterable[Target], max_rank: int) -> AdapterFiles:
    """Read an adapter's files. Raises AdapterError, which names the file that is missing or too large."""
    limits = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: max_file_bytes(targets, max_rank)}
    contents = {}
    for name, limit in limits.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if not path.is_file() or size > limit:
                raise AdapterError(f"{name} has {size} bytes; an adapter for this model has at most {limit}")
            with path.open("rb") as file:
                # Read no more than that, since the file may have grown meanwhile; its size is checked again later.
                contents[name] = file.read(limit + 1)
        except OSError as error:
            if name == WEIGHTS and (folder / PICKLE).exists():
                raise AdapterError(
                    f"{PICKLE} is a pickle, which may run code: save the adapter as {WEIGHTS}"
                ) from error
            raise AdapterError(f"{name} cannot be read: {error.strerror or error}") from error
    return AdapterFiles(contents[CONFIG], contents[WEIGHTS])


def max_file_bytes(targets: Iterable[Target], max_rank: int) -> int:
    """Maximum size of the weights file: an adapter of all targets of the model, in float32."""
    values = sum(max_rank * (target.inputs.total + target.outputs.total) for target in targets)
    return min(MAX_FILE_BYTES, values * torch.float32.itemsize + MAX_HEADER_BYTES)


def read_adapter(
    files: AdapterFiles, targets: Mapping[str, Target], max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """`targets`: by path. Raises AdapterError."""
    if len(files.config) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG} has {len(files.config)} bytes, at most {MAX_CONFIG_BYTES} are allowed")
    config = AdapterConfig.read(files.config)
    tensors = _tensors(files.weights, max_file_bytes(targets.values(), max_rank))
    pairs: dict[str, _Pair] = {}
    for name, tensor in tensors.items():
        parsed = _parse_name(name, targets)
        pair = pairs.setdefault(parsed.path, _Pair(parsed.module, {}))
        if pair.module != parsed.module:
            raise AdapterError(f"{shown(pair.module)} and {shown(parsed.module)} are the same module of this model")
        pair.sides[parsed.side] = tensor
    if not pairs:
        raise AdapterError(f"{WEIGHTS} has no tensors")
    # In the order of the model's targets, which may differ from the file's.
    modules = (_module(targets[path], pairs[path], config, max_rank, dtype) for path in targets if path in pairs)
    return AdapterWeights(tuple(modules))


class _TensorName(NamedTuple):
    """The parsed name of a tensor."""

    path: str
    """Path of the target."""
    module: str
    """Path of the module in the model that was trained, such as "model.language_model.layers.0.mlp.up_proj"."""
    side: str
    """One of SIDES."""


class _Pair(NamedTuple):
    """The tensors of one module, by side."""

    module: str
    sides: dict[str, Tensor]


def _tensors(data: Data, limit: int) -> dict[str, Tensor]:
    if len(data) > limit:
        raise AdapterError(f"{WEIGHTS} has {len(data)} bytes; an adapter for this model has at most {limit}")
    try:
        return read_matrices(data)
    except TensorFileError as error:
        raise AdapterError(f"{WEIGHTS} {error}") from error


def _parse_name(name: str, targets: Mapping[str, Target]) -> _TensorName:
    decoder = next((prefix for prefix in DECODERS if name.startswith(WRAPPER + prefix)), None)
    match = None if decoder is None else TENSOR.fullmatch(name.removeprefix(WRAPPER + decoder))
    if decoder is None or match is None:
        raise AdapterError(f"tensor {shown(name)} is not supported: {_why_unsupported(name)}")
    if match["path"] not in targets:
        raise AdapterError(f"tensor {shown(name)}: adapters of this model cannot change {match['path']}")
    return _TensorName(match["path"], decoder + match["path"], match["side"])


def _why_unsupported(name: str) -> str:
    for part, why in (
        ("lora_magnitude_vector", "DoRA"),
        ("modules_to_save", "whole modules"),
        ("vision_tower", "adapters of the vision tower"),
        ("multi_modal_projector", "adapters of the projector of images"),
        ("lm_head", "adapters of the output head"),
        ("embed", "adapters of the embedding"),
        ("bias", "biases"),
    ):
        if part in name:
            return f"{why} cannot be served"
    return f"expected {WRAPPER}{DECODERS[-1]}layers.N.MODULE.lora_A.weight and lora_B.weight"


def _module(target: Target, pair: _Pair, config: AdapterConfig, max_rank: int, dtype: torch.dtype) -> ModuleWeights:
    path, (module, sides) = target.path, pair
    if missing := [side for side in SIDES if side not in sides]:
        raise AdapterError(f"{path} has no {missing[0]}")
    rank = config.rank_of(module)
    if rank > max_rank:
        raise AdapterError(f"{path} has rank {rank}; this engine serves ranks up to {max_rank} (lora_max_adapter_size)")
    shapes = {"lora_A": (rank, target.inputs.total), "lora_B": (target.outputs.total, rank)}
    for side, shape in shapes.items():
        if tuple(sides[side].shape) != shape:
            raise AdapterError(
                f"{path}.{side} has shape {tuple(sides[side].shape)}; the model and rank {rank} require {shape}"
            )
    a = sides["lora_A"].to(dtype).contiguous()
    b = (sides["lora_B"].float() * config.scaling(module, rank)).t().to(dtype).contiguous()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise AdapterError(f"{path} has values that are not finite in {str(dtype).removeprefix('torch.')}")
    return ModuleWeights(target, a, b)
