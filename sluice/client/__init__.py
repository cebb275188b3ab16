"""Clients of a Sluice server: the blocking `Client` and the asyncio `AsyncClient`. Both raise `SluiceError`."""

from sluice.client.adapters import (
    Lora,
    LoraWeights,
    PromptAdapter,
    RouterLoras,
    RouterPromptAdapters,
    read_lora,
)
from sluice.client.admin import AsyncCacheEvents, AsyncSteps, CacheEvents, RankAnswer, ServingVersion, Steps
from sluice.client.async_client import AsyncClient
from sluice.client.client import Client
from sluice.client.connection import DEFAULT_ADDRESS, ClientOptions, Metadata, TlsOptions
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
from sluice.client.options import KvCache, Message, Options, Prompt, PromptEmbeds, TokenizeOptions, TokenRangeRetention
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
from sluice.client.streams import AsyncStream, Stream
from sluice.client.values import Embeddings, embeddings_of

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
