"""The configuration of the KV cache, and retention priorities of its blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import ClassVar

from sluice.trtllm.checked import ALL_POSITIVE, FRACTION, POSITIVE, Checked, Limit, from_to
from sluice.trtllm.enums import KvCacheTransferMode
from sluice.trtllm.errors import OptionError

DEFAULT_PRIORITY = 35
PRIORITY = from_to(0, 100)


@dataclass
class RuntimeDefaults:
    """A model's values for fields of `KvCacheConfig` that are not set."""

    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None


@dataclass
class KvCacheConfig(Checked):
    """The KV cache of each engine. Raises OptionError for a value out of range."""

    enable_block_reuse: bool = True
    """Whether requests share the blocks of common prompt prefixes."""
    max_tokens: int | None = None
    """Capacity in tokens. If `free_gpu_memory_fraction` is given too, the smaller capacity applies."""
    max_attention_window: list[int] | None = None
    """Attention window of each layer, in tokens; repeated over the layers."""
    sink_token_length: int | None = None
    """Not supported."""
    free_gpu_memory_fraction: float | None = None
    """Fraction of the free device memory, in (0, 1)."""
    host_cache_size: int | None = None
    """Main memory for blocks evicted from the device, in bytes."""
    onboard_blocks: bool = True
    """Only True is supported: blocks in host memory are always copied back before use."""
    cross_kv_cache_fraction: float | None = None
    """Not supported."""
    secondary_offload_min_priority: int | None = None
    """Not supported."""
    event_buffer_max_size: int = 0
    """KV cache events that each engine buffers; 0: none are recorded."""
    _: KW_ONLY
    enable_partial_reuse: bool = True
    """No effect, like `copy_on_partial_reuse`: only whole blocks are reused."""
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    """Not supported."""
    attention_dp_events_gather_period_ms: int = 5
    """No effect."""
    runtime_defaults: InitVar[RuntimeDefaults | None] = None
    max_gpu_total_bytes: int = 0
    """Not supported."""

    LIMITS: ClassVar[Mapping[str, Limit]] = {
        "max_tokens": POSITIVE,
        "max_attention_window": ALL_POSITIVE,
        "sink_token_length": POSITIVE,
        "free_gpu_memory_fraction": FRACTION,
        "cross_kv_cache_fraction": FRACTION,
        "event_buffer_max_size": from_to(0, 1 << 20),
    }

    def __post_init__(self, runtime_defaults: RuntimeDefaults | None) -> None:
        if runtime_defaults is not None:
            self.fill_empty_fields_from_runtime_defaults(runtime_defaults)

    def fill_empty_fields_from_runtime_defaults(self, runtime_defaults: RuntimeDefaults) -> None:
        if self.max_attention_window is None:
            self.max_attention_window = runtime_defaults.max_attention_window
        if self.sink_token_length is None:
            self.sink_token_length = runtime_defaults.sink_token_length


@dataclass
class TokenRangeRetentionConfig(Checked):
    """Retention priority, from 0 to 100, of the blocks of the prompt tokens [token_start, token_end)."""

    token_start: int
    token_end: int | None
    priority: int
    duration_ms: timedelta | None = None

    LIMITS: ClassVar[Mapping[str, Limit]] = {"priority": PRIORITY}


@dataclass
class KvCacheRetentionConfig(Checked):
    """Retention priorities of a request's blocks. The ranges become sorted.

    Raises OptionError for an empty range, or for ranges that overlap.
    """

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig]
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: timedelta | None = None
    transfer_mode: KvCacheTransferMode = KvCacheTransferMode.DRAM
    directory: str | None = None

    TokenRangeRetentionConfig: ClassVar[type[TokenRangeRetentionConfig]] = TokenRangeRetentionConfig
    LIMITS: ClassVar[Mapping[str, Limit]] = {"decode_retention_priority": PRIORITY}

    def __post_init__(self) -> None:
        configs = sorted(self.token_range_retention_configs, key=lambda config: config.token_start)
        self.token_range_retention_configs = configs
        for config, following in zip_longest(configs, configs[1:]):
            _check_range(config, following)


def _check_range(config: TokenRangeRetentionConfig, following: TokenRangeRetentionConfig | None) -> None:
    name = f"the token range [{config.token_start}, {config.token_end})"
    if config.token_start < 0 or (config.token_end is not None and config.token_start >= config.token_end):
        raise OptionError(f"{name} must start at 0 or later and must not be empty")
    if following is not None and (config.token_end is None or config.token_end > following.token_start):
        raise OptionError(f"{name} overlaps the range that starts at {following.token_start}")
