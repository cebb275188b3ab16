"""What a decoder is computed in."""

from typing import NamedTuple

from engine_worker.runner.config import RunnerConfig

TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "u8": "u8"}
"""Names of settings, and OpenVINO's."""
CACHES = {"float32": ("float32", "float16", "u8"), "bfloat16": ("bfloat16", "u8")}
"""Precisions of the KV cache, the default first, by that of the computation."""


class Precision(NamedTuple):
    """By the settings `dtype`, `quantize` and `kv_precision`, none of them "auto"."""

    dtype: str = "float32"
    """Of activations and sums."""
    quantize: str = "none"
    kv: str = "float32"

    @classmethod
    def of(cls, config: RunnerConfig) -> "Precision":
        """Raises ValueError if the KV cache cannot have its precision with such a computation."""
        dtype = "float32" if config.dtype == "auto" else config.dtype
        caches = CACHES[dtype]
        kv = caches[0] if config.kv_precision == "auto" else config.kv_precision
        if kv not in caches:
            raise ValueError(f"kv_precision = {kv} contradicts dtype = {dtype}: possible are {', '.join(caches)}")
        return cls(dtype, config.quantize, kv)

    @property
    def properties(self) -> dict[str, str]:
        """For the plugin; else it computes in bfloat16 wherever the CPU has units for it."""
        return {"INFERENCE_PRECISION_HINT": TYPES[self.dtype], "KV_CACHE_PRECISION": TYPES[self.kv]}

    def __str__(self) -> str:
        """What makes an engine's tokens differ from those of others."""
        weights = self.dtype if self.quantize == "none" else self.quantize
        computed = f"{weights}, computed in {self.dtype}" if weights != self.dtype != "float32" else weights
        return computed if self.kv == self.dtype else f"{computed}, KV cache {self.kv}"
