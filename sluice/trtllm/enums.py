"""Enumerations with the names and values of tensorrt_llm.bindings.executor."""

from enum import Enum

from sluice.trtllm.options import OptionError


class ModelType(Enum):
    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class BatchingType(Enum):
    STATIC = 0
    INFLIGHT = 1


class CapacitySchedulerPolicy(Enum):
    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(Enum):
    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class CommunicationType(Enum):
    MPI = 0


class CommunicationMode(Enum):
    LEADER = 0
    ORCHESTRATOR = 1


class RequestType(Enum):
    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


class FinishReason(Enum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class KvCacheTransferMode(Enum):
    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


class CacheTransceiverBackendType(Enum):
    DEFAULT = 0
    MPI = 1
    UCX = 2
    NIXL = 3
    MOONCAKE = 4

    @staticmethod
    def from_string(name: str) -> "CacheTransceiverBackendType":
        """The member of this name, in upper or lower case. Raises OptionError."""
        for member in CacheTransceiverBackendType:
            if name in (member.name, member.name.lower()):
                return member
        raise OptionError(f"Invalid backend type: {name}")


class RequestStage(Enum):
    QUEUED = 0
    ENCODER_IN_PROGRESS = 1
    CONTEXT_IN_PROGRESS = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_COMPLETE = 4
