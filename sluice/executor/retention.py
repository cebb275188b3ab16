"""How eagerly the KV cache keeps the blocks of one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

DEFAULT_PRIORITY = 35

Milliseconds = timedelta | float
"""A number is milliseconds, as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Priority of the blocks of prompt tokens from `token_start` up to but without `token_end`."""

    token_start: int
    token_end: int | None
    """None: to the end of the prompt."""
    priority: int
    """0 (evicted first) to 100 (evicted last)."""
    duration_ms: Milliseconds | None = None
    """Afterwards the priority is the default, 35. None: until evicted."""

    def options(self) -> dict[str, Any]:
        """As sluice.v1.TokenRangeRetention."""
        found = {"start": self.token_start, "priority": self.priority}
        if self.token_end is not None:
            found["end"] = self.token_end
        return found | _duration("duration", self.duration_ms)


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Priorities of a prompt's ranges and of the blocks that generation fills. What no range covers has 35."""

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: Milliseconds | None = None

    TokenRangeRetentionConfig: ClassVar[type[TokenRangeRetentionConfig]] = TokenRangeRetentionConfig

    def options(self) -> dict[str, Any]:
        """As sluice.v1.KvCacheOptions. A default priority without a duration is left out: it changes nothing."""
        found: dict[str, Any] = {}
        if self.token_range_retention_configs:
            found["prompt_retention"] = [each.options() for each in self.token_range_retention_configs]
        if self.decode_retention_priority != DEFAULT_PRIORITY or self.decode_duration_ms is not None:
            found["decode_priority"] = self.decode_retention_priority
        return found | _duration("decode_duration", self.decode_duration_ms)


def _duration(name: str, value: Milliseconds | None) -> dict[str, timedelta]:
    if value is None:
        return {}
    return {name: value if isinstance(value, timedelta) else timedelta(milliseconds=value)}
