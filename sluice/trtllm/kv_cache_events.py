"""KVCacheEventManager: the events of all engines of an executor."""

from datetime import timedelta

from sluice.executor import GenerationExecutor, KVCacheEvent


class KVCacheEventManager:
    def __init__(self, executor: GenerationExecutor) -> None:
        self._executor = executor
        # From now on events are received, so that a call that does not wait finds some.
        executor.follow_kv_cache_events()

    def get_latest_events(self, timeout_ms: timedelta | float | None = None) -> list[KVCacheEvent]:
        """Events since the last call; waits for the first, at most so long. A number is milliseconds, as there.

        Raises RuntimeError once shut down and everything is read.
        """
        timeout = timedelta(milliseconds=timeout_ms) if isinstance(timeout_ms, int | float) else timeout_ms
        return self._executor.get_kv_cache_events(timeout)
