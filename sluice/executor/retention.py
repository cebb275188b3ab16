"""How eagerly the KV cache keeps the blocks of one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from sluice.client import KvCache, TokenRangeRetention

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

    def options(self) -> TokenRangeRetention:
        """As an option of `sluice.client`."""
        return TokenRangeRetention(
            start=self.token_start,
            end=self.token_end,
            priority=self.priority,
            duration=_duration(self.duration_ms),
        )


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Priorities of a prompt's ranges and of the blocks that generation fills. What no range covers has 35."""

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: Milliseconds | None = None

    TokenRangeRetentionConfig: ClassVar[type[TokenRangeRetentionConfig]] = TokenRangeRetentionConfig

    def options(self) -> KvCache:
        """As an option of `sluice.client`. A default priority without a duration is unset: it changes nothing."""
        is_default = self.decode_retention_priority == DEFAULT_PRIORITY and self.decode_duration_ms is None
        return KvCache(
            prompt_retention=[each.options() for each in self.token_range_retention_configs],
            decode_priority=None if is_default else self.decode_retention_priority,
            decode_duration=_duration(self.decode_duration_ms),
        )


def _duration(value: Milliseconds | None) -> timedelta | None:
    return value if value is None or isinstance(value, timedelta) else timedelta(milliseconds=value)
