"""Retention priorities of one request's KV cache blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from sluice.client import KvCache, TokenRangeRetention
from sluice.executor.waiting import Milliseconds, as_timedelta

DEFAULT_PRIORITY = 35


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Priority of the blocks of the prompt tokens [token_start, token_end)."""

    token_start: int
    token_end: int | None
    """None: the end of the prompt."""
    priority: int
    """0 (evicted first) to 100 (evicted last)."""
    duration_ms: Milliseconds | None = None
    """After it the default priority of 35 applies. None: until evicted."""

    def options(self) -> TokenRangeRetention:
        """The option of `sluice.client`."""
        return TokenRangeRetention(
            start=self.token_start,
            end=self.token_end,
            priority=self.priority,
            duration=as_timedelta(self.duration_ms),
        )


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Priorities of prompt ranges and of generated blocks; 35 where no range applies."""

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: Milliseconds | None = None

    TokenRangeRetentionConfig: ClassVar[type[TokenRangeRetentionConfig]] = TokenRangeRetentionConfig

    def options(self) -> KvCache:
        """The option of `sluice.client`; the default decode priority is left unset."""
        is_default = self.decode_retention_priority == DEFAULT_PRIORITY and self.decode_duration_ms is None
        return KvCache(
            prompt_retention=[each.options() for each in self.token_range_retention_configs],
            decode_priority=None if is_default else self.decode_retention_priority,
            decode_duration=as_timedelta(self.decode_duration_ms),
        )

    @property
    def is_bounded(self) -> bool:
        """Whether some range may exceed a short prompt."""
        return any(each.token_start or each.token_end is not None for each in self.token_range_retention_configs)

    def within(self, num_tokens: int) -> Self:
        """The ranges cut to a prompt of `num_tokens`; those beyond it are dropped."""
        ranges = [
            each if each.token_end is None else replace(each, token_end=min(each.token_end, num_tokens))
            for each in self.token_range_retention_configs
            if each.token_start < num_tokens
        ]
        return replace(self, token_range_retention_configs=ranges)
