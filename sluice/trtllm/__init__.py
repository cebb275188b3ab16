"""The API of tensorrt_llm.bindings.executor over `sluice.executor`: `import sluice.trtllm as trtllm`.

Classes and fields have TensorRT-LLM's names and defaults. docs/trtllm.md describes how each maps to Sluice, and which
options are unsupported.
"""

from typing import NoReturn

from sluice import __version__
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
from sluice.trtllm import kv_cache
from sluice.trtllm.config import (
    CacheTransceiverConfig,
    DebugConfig,
    DynamicBatchConfig,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    OrchestratorConfig,
    ParallelConfig,
    PeftCacheConfig,
    RuntimeDefaults,
    SchedulerConfig,
)
from sluice.trtllm.enums import (
    BatchingType,
    CacheTransceiverBackendType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    FinishReason,
    KvCacheTransferMode,
    ModelType,
    RequestStage,
    RequestType,
)
from sluice.trtllm.executor import Executor
from sluice.trtllm.kv_cache import KVCacheEventManager
from sluice.trtllm.options import OptionError, UnsupportedOptionError
from sluice.trtllm.request import (
    AdditionalModelOutput,
    ContextPhaseParams,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LoraConfig,
    MropeConfig,
    MultimodalInput,
    OutputConfig,
    PromptTuningConfig,
    Request,
    SamplingConfig,
)
from sluice.trtllm.result import AdditionalOutput, Response, Result, deserialize_result
from sluice.trtllm.speculation import (
    DecodingConfig,
    DecodingMode,
    EagleConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    SpeculativeDecodingConfig,
    SpeculativeDecodingFastLogitsInfo,
)
from sluice.trtllm.statistics import (
    DebugTensorsPerIteration,
    DisServingRequestStats,
    InflightBatchingStats,
    IterationStats,
    KvCacheMetrics,
    KvCacheStats,
    RequestPerfMetrics,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
    SpeculativeDecodingMetrics,
    StaticBatchingStats,
    TimingMetrics,
)

SchedulerPolicy = CapacitySchedulerPolicy
"""Its name in older versions of TensorRT-LLM."""

__all__ = [
    "AdditionalModelOutput", "AdditionalOutput", "BatchingType", "CacheTransceiverBackendType",
    "CacheTransceiverConfig", "CapacitySchedulerPolicy", "CommunicationMode", "CommunicationType",
    "ContextChunkingPolicy", "ContextPhaseParams", "DebugConfig", "DebugTensorsPerIteration", "DecodingConfig",
    "DecodingMode", "DisServingRequestStats", "DynamicBatchConfig", "EagleConfig", "Executor", "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig", "ExternalDraftTokensConfig", "FinishReason", "GuidedDecodingConfig",
    "GuidedDecodingParams", "InflightBatchingStats", "IterationStats", "KVCacheCreatedData", "KVCacheEvent",
    "KVCacheEventDiff", "KVCacheEventManager", "KVCacheRemovedData", "KVCacheStoredBlockData", "KVCacheStoredData",
    "KVCacheUpdatedData", "KvCacheConfig", "KvCacheMetrics", "KvCacheRetentionConfig", "KvCacheStats",
    "KvCacheTransferMode", "LogitsPostProcessorConfig", "LookaheadDecodingConfig", "LoraConfig", "ModelType",
    "MropeConfig", "MultimodalInput", "OptionError", "OrchestratorConfig", "OutputConfig", "ParallelConfig",
    "PeftCacheConfig", "PromptTuningConfig", "Request", "RequestPerfMetrics", "RequestStage", "RequestStats",
    "RequestStatsPerIteration", "RequestType", "Response", "Result", "RuntimeDefaults", "SamplingConfig",
    "SchedulerConfig", "SchedulerPolicy", "SpecDecodingStats", "SpeculativeDecodingConfig",
    "SpeculativeDecodingFastLogitsInfo",
    "SpeculativeDecodingMetrics", "StaticBatchingStats", "TimingMetrics", "UniqueToken", "UnsupportedOptionError",
    "__version__", "deserialize_result", "kv_cache",
]  # fmt: skip

_INSTEAD = {
    **dict.fromkeys(("LLM", "SamplingParams"), "from sluice import {name}"),
    **dict.fromkeys(
        ("GenerationExecutor", "GenerationRequest", "GenerationResult"), "from sluice.executor import {name}"
    ),
    **dict.fromkeys(("ModelRunner", "ModelRunnerCpp"), "sluice.trtllm.Executor runs models"),
    **dict.fromkeys(("DataType", "MemoryType", "Shape", "Tensor"), "tensors are those of torch"),
}
"""Other names of TensorRT-LLM, and what to write in their place."""


def __getattr__(name: str) -> NoReturn:
    """Raises ImportError for names in `_INSTEAD`: `from sluice.trtllm import …` would drop an AttributeError's text."""
    if name in _INSTEAD:
        raise ImportError(f"sluice.trtllm has no {name}: {_INSTEAD[name].format(name=name)}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; docs/trtllm.md lists what it has")
