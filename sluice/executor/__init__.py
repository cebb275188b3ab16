"""Generation as a library, with TensorRT-LLM's names: `with GenerationExecutor.create() as executor: …`.

See docs/executor.md.
"""

from sluice.executor.config import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    KvCacheConfig,
    PeftCacheConfig,
    SchedulerConfig,
)
from sluice.executor.errors import CollectiveRpcError, RequestError
from sluice.executor.executor import GenerationExecutor
from sluice.executor.kv_cache_events import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUnknownData,
    KVCacheUpdatedData,
    UniqueToken,
)
from sluice.executor.request import (
    GenerationRequest,
    KvCacheRetentionConfig,
    LoRARequest,
    Priority,
    PromptAdapterRequest,
    TokenRangeRetentionConfig,
)
from sluice.executor.response import CompletionOutput, Logprob, Response, Result
from sluice.executor.result import GenerationResult
from sluice.executor.sampling import AdditionalModelOutput, GuidedDecodingParams, SamplingParams
from sluice.executor.stats import ReportedBatch as InflightBatchingStats
from sluice.executor.stats import ReportedCache as KvCacheStats
from sluice.executor.stats import ReportedRequest as RequestStats
from sluice.executor.stats import ReportedStaticBatch as StaticBatchingStats
from sluice.executor.stats import ReportedStep as IterationStats
from sluice.executor.stats import RequestStage
from sluice.executor.waiting import Deadline

__all__ = [
    "AdditionalModelOutput", "CapacitySchedulerPolicy", "CollectiveRpcError", "CompletionOutput",
    "ContextChunkingPolicy", "Deadline", "GenerationExecutor", "GenerationRequest", "GenerationResult",
    "GuidedDecodingParams", "InflightBatchingStats", "IterationStats", "KVCacheCreatedData", "KVCacheEvent",
    "KVCacheEventDiff", "KVCacheRemovedData", "KVCacheStoredBlockData", "KVCacheStoredData", "KVCacheUnknownData",
    "KVCacheUpdatedData", "KvCacheConfig", "KvCacheRetentionConfig", "KvCacheStats", "LoRARequest", "Logprob",
    "PeftCacheConfig", "Priority", "PromptAdapterRequest", "RequestError", "RequestStage", "RequestStats", "Response",
    "Result", "SamplingParams", "SchedulerConfig", "StaticBatchingStats", "TokenRangeRetentionConfig", "UniqueToken",
]  # fmt: skip
