"""Numeric precision of a decoder: activations, weights and KV cache."""

from typing import NamedTuple

from engine_worker.runner.config import RunnerConfig

TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "u8": "u8"}
"""OpenVINO's name of each type that the settings can name."""
CACHE_TYPES = {"float32": ("float32", "float16", "u8"), "bfloat16": ("bfloat16", "u8")}
"""For each `dtype`, the types that the KV cache can have, the default first."""


class Precision(NamedTuple):
    """The settings `dtype`, `quantize` and `kv_precision` after "auto" was resolved."""

    dtype: str = "float32"
    """Type of activations and accumulators."""
    quantize: str = "none"
    kv: str = "float32"
    """Type of the KV cache."""

    @classmethod
    def of(cls, config: RunnerConfig) -> "Precision":
        """Raises ValueError if `kv_precision` is not available with `dtype`."""
        dtype = "float32" if config.dtype == "auto" else config.dtype
        cache_types = CACHE_TYPES[dtype]
        kv = cache_types[0] if config.kv_precision == "auto" else config.kv_precision
        if kv not in cache_types:
            raise ValueError(f"kv_precision = {kv} contradicts dtype = {dtype}: use {' or '.join(cache_types)}")
        return cls(dtype, config.quantize, kv)

    @property
    def separates(self) -> bool:
        """See `Runner`. u8 keys of a block are quantized together: their values depend on the steps that wrote them."""
        return self.kv != "u8"

    @property
    def properties(self) -> dict[str, str]:
        """For the plugin. Without them it computes in bfloat16 on every CPU that supports it."""
        return {"INFERENCE_PRECISION_HINT": TYPES[self.dtype], "KV_CACHE_PRECISION": TYPES[self.kv]}

    def __str__(self) -> str:
        """Name of the computation. Engines whose names differ may sample different tokens."""
        weights = self.dtype if self.quantize == "none" else self.quantize
        computed = f"{weights}, computed in {self.dtype}" if weights != self.dtype != "float32" else weights
        return computed if self.kv == self.dtype else f"{computed}, KV cache {self.kv}"
