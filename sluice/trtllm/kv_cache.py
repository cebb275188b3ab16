"""The names of tensorrt_llm.bindings.executor.kv_cache, where newer versions define the events of the KV cache."""

from datetime import timedelta

from sluice.executor import (
    GenerationExecutor,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
)


class KVCacheEventManager:
    """Reads the KV cache events of all engines of an executor. See `Executor.get_kv_cache_event_manager`."""

    def __init__(self, executor: GenerationExecutor) -> None:
        self._executor = executor
        # Events are received from now on, so that a call that does not wait can return some.
        executor.follow_kv_cache_events()

    def get_latest_events(self, timeout_ms: timedelta | float | None = None) -> list[KVCacheEvent]:
        """Return the events since the last call. Waits up to `timeout_ms` (None: without limit) for the first.

        A number is in milliseconds. Raises RuntimeError after the executor's `shutdown`, once every event has been
        read.
        """
        timeout = timedelta(milliseconds=timeout_ms) if isinstance(timeout_ms, int | float) else timeout_ms
        return self._executor.get_kv_cache_events(timeout)


KVCacheEventDiffInt = KVCacheEventDiff

__all__ = [
    "KVCacheCreatedData", "KVCacheEvent", "KVCacheEventDiffInt", "KVCacheEventManager", "KVCacheRemovedData",
    "KVCacheStoredBlockData", "KVCacheStoredData", "KVCacheUpdatedData", "UniqueToken",
]  # fmt: skip
