"""The names of tensorrt_llm.bindings.executor.kv_cache, where newer versions define the events of the KV cache."""

from sluice.executor import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
)
from sluice.trtllm.kv_cache_events import KVCacheEventManager

KVCacheEventDiffInt = KVCacheEventDiff

__all__ = [
    "KVCacheCreatedData", "KVCacheEvent", "KVCacheEventDiffInt", "KVCacheEventManager", "KVCacheRemovedData",
    "KVCacheStoredBlockData", "KVCacheStoredData", "KVCacheUpdatedData", "UniqueToken",
]  # fmt: skip
