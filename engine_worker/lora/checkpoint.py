"""Reads an adapter from the two files that peft saves, and validates it against the model.

The files come from users: sizes are checked against limits that follow from the model before anything is parsed, and
weights are only read from safetensors.
"""

import re
from collections.abc import Iterable, Mapping
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from engine_worker.layers.adapters import Target
from engine_worker.lora.tensor_file import MAX_HEADER_BYTES, read_matrices, shown
from sluice.checkpoint.peft import CONFIG, DESCRIPTIONS, PICKLE, WEIGHTS
from sluice.checkpoint.tensor_file import INVALID_JSON, TensorFileError
from sluice.wire.adapters import MAX_CONFIG_BYTES, MAX_FILE_BYTES, AdapterFiles, Data

WRAPPER = "base_model.model."
"""Prefix of all tensor names, by peft."""
DECODERS = ("language_model.model.", "model.language_model.", "model.")
"""Prefixes that follow: the decoder of a vision-language model, in older and newer versions of transformers, or of a
text model."""
SIDES = ("lora_A", "lora_B")
TENSOR = re.compile(r"(?P<path>layers\.\d{1,5}\.\w{1,32}\.\w{1,32})\.(?P<side>lora_[AB])\.weight", re.ASCII)
MAX_PATTERN = 4096
"""Entries of rank_pattern and of alpha_pattern."""
PLAIN_KEY = re.compile(r"(?P<name>\^?[\w.]{1,256})\$?", re.ASCII)
"""A key of rank_pattern and alpha_pattern: ^ and a module's name, or the end of a name. peft allows any regular
expression."""
NEUTRAL_INITS = ("gaussian", "eva", "orthogonal", "true", "false")
"""Values of init_lora_weights that do not change the base weights."""
WITHOUT_EFFECT = DESCRIPTIONS | frozenset(
    [
        "target_modules",
        "exclude_modules",
        "lora_dropout",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
    ]
)
"""Options that only matter in training, or that follow from the tensors."""
READ = frozenset(
    ["peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"]
)
"""Options that are read. All other options must be off."""


class AdapterError(ValueError):
    """An adapter that cannot be served; the message says why."""


class AdapterConfig(NamedTuple):
    rank: int
    alpha: float
    by_root: bool
    """Scaled by alpha / sqrt(r) (rank-stabilized LoRA, arXiv:2312.03732); otherwise by alpha / r."""
    ranks: Mapping[str, int]
    """rank_pattern; keys as in PLAIN_KEY."""
    alphas: Mapping[str, float]
    """alpha_pattern; keys as in PLAIN_KEY."""

    @classmethod
    def read(cls, data: bytes) -> "AdapterConfig":
        try:
            raw = msgspec.json.decode(data, type=dict[str, Any])
        except INVALID_JSON as error:
            raise AdapterError(f"{CONFIG} is not a JSON object: {error}") from error
        if raw.get("peft_type") != "LORA":
            raise AdapterError(f"{CONFIG}: peft_type must be LORA (got {shown(raw.get('peft_type'))})")
        for name, value in raw.items():
            if name not in WITHOUT_EFFECT and name not in READ and value not in (None, False, [], {}, ""):
                raise AdapterError(f"{CONFIG}: {shown(name)} = {shown(value)} is not supported")
        if raw.get("bias", "none") != "none":
            raise AdapterError(f"{CONFIG}: bias must be none (got {shown(raw['bias'])})")
        init = raw.get("init_lora_weights")
        if init is not None and str(init).lower() not in NEUTRAL_INITS:
            raise AdapterError(
                f"{CONFIG}: init_lora_weights = {shown(init)} changes the base weights; convert the adapter first"
            )
        return cls(
            _rank(raw.get("r", 8)),
            _alpha(raw.get("lora_alpha", 8)),
            raw.get("use_rslora") is True,
            {_key("rank_pattern", key): _rank(value) for key, value in _pattern(raw, "rank_pattern").items()},
            {_key("alpha_pattern", key): _alpha(value) for key, value in _pattern(raw, "alpha_pattern").items()},
        )

    def rank_of(self, module: str) -> int:
        rank: int = _find(self.ranks, module, self.rank)
        return rank

    def scaling(self, module: str, rank: int) -> float:
        alpha: float = _find(self.alphas, module, self.alpha)
        return alpha / (sqrt(rank) if self.by_root else rank)


def _find(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    # As in peft, the first matching key counts.
    return next((value for key, value in pattern.items() if _fits(key, module)), default)


def _fits(key: str, module: str) -> bool:
    return module == key[1:] if key.startswith("^") else f".{module}".endswith(f".{key}")


def _key(option: str, key: str) -> str:
    match = PLAIN_KEY.fullmatch(key)
    if match is None:
        raise AdapterError(f"{CONFIG}: keys of {option} must be names of modules, not expressions such as {shown(key)}")
    return match["name"]


def _pattern(raw: Mapping[str, Any], option: str) -> dict[str, Any]:
    pattern = raw.get(option) or {}
    if not isinstance(pattern, dict) or len(pattern) > MAX_PATTERN:
        raise AdapterError(
            f"{CONFIG}: {option} must be an object of at most {MAX_PATTERN} modules (got {shown(pattern)})"
        )
    return pattern


def _rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{CONFIG}: a rank must be a positive integer (got {shown(value)})")
    return value


def _alpha(value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e9 or not isfinite(value):
        raise AdapterError(f"{CONFIG}: lora_alpha must be a number up to 1e9 (got {shown(value)})")
    return float(value)


class ModuleWeights(NamedTuple):
    """The low-rank matrices of an adapter for one linear map, to which it adds x a^T b, with x [T, inputs]. They are
    those of the whole map, and then contiguous, or of one rank's share."""

    target: Target
    a: Tensor
    """[r, inputs]."""
    b: Tensor
    """[r, outputs], multiplied by the scaling."""

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
