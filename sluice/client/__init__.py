"""Clients of a Sluice server: the blocking `Client` and the asyncio `AsyncClient`. Both raise `SluiceError`."""

from sluice.client.async_client import AsyncClient
from sluice.client.client import Client
from sluice.client.connection import DEFAULT_ADDRESS, ClientOptions, Metadata, TlsOptions
from sluice.client.embeddings import Embeddings, embeddings_of
from sluice.client.engine_calls import RankAnswer
from sluice.client.errors import (
    AdapterMissing,
    AdapterNotFound,
    AlreadyExists,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    LostEvents,
    ModelChanged,
    ModelNotFound,
    NotImplementedByServer,
    Overloaded,
    Poison,
    ServerError,
    SluiceError,
    Unauthenticated,
    Unavailable,
    Unreachable,
    Violation,
    WrongServer,
)
from sluice.client.feeds import AsyncCacheEvents, AsyncSteps, CacheEvents, Steps
from sluice.client.loras import Lora, LoraWeights, RouterLoras, read_lora
from sluice.client.options import KvCache, Message, Options, Prompt, PromptEmbeds, TokenizeOptions, TokenRangeRetention
from sluice.client.prompt_adapters import PromptAdapter, RouterPromptAdapters
from sluice.client.results import (
    Chunk,
    FinishReason,
    Generation,
    Output,
    Tensor,
    Timings,
    Tokenization,
    TokenLogprob,
    Usage,
)
from sluice.client.serving_version import ServingVersion
from sluice.client.streams import AsyncStream, Stream

__all__ = [
    "DEFAULT_ADDRESS", "AdapterMissing", "AdapterNotFound", "AlreadyExists", "AsyncCacheEvents", "AsyncClient",
    "AsyncSteps", "AsyncStream", "CacheEvents", "Cancelled", "Chunk", "Client", "ClientOptions", "ConnectionLost",
    "DeadlineExceeded", "Embeddings", "FinishReason", "Forbidden", "Generation", "InvalidRequest", "KvCache", "Lora",
    "LoraWeights", "LostEvents", "Message", "Metadata", "ModelChanged", "ModelNotFound", "NotImplementedByServer",
    "Options", "Output", "Overloaded", "Poison", "Prompt", "PromptAdapter", "PromptEmbeds", "RankAnswer", "RouterLoras",
    "RouterPromptAdapters", "ServerError", "ServingVersion", "SluiceError", "Steps", "Stream", "Tensor", "Timings",
    "TlsOptions", "TokenLogprob", "TokenRangeRetention", "Tokenization", "TokenizeOptions", "Unauthenticated",
    "Unavailable", "Unreachable", "Usage", "Violation", "WrongServer", "embeddings_of", "read_lora",
]  # fmt: skip
