"""Reads adapter_config.json as peft writes it: ranks and scaling. Options that an engine cannot apply are refused."""

import re
from collections.abc import Mapping
from math import isfinite, sqrt
from typing import Any, NamedTuple

import msgspec

from sluice.checkpoint.peft import CONFIG, DESCRIPTIONS
from sluice.checkpoint.tensor_file import INVALID_JSON

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


def shown(value: Any) -> str:
    return repr(value)[:80]
