"""The messages that routers send about requests, and the unions of messages that each service receives.

Messages are msgspec Structs in MessagePack. `request` is a random number chosen by the router; the caller's request id
is used only for logs.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.wire.adapters import (
    Adapter,
    AdapterLoaded,
    AdapterMessage,
    PromptAdapterMessage,
    PromptAdapterRead,
)
from sluice.wire.cache_events import CacheEvents, ReadCacheEvents
from sluice.wire.calls import CallAnswer, EngineCall
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello, KeepAlive
from sluice.wire.message import (
    Count,
    Index,
    Logprobs,
    Message,
    Name,
    Number,
    Priority,
    Salt,
    Seconds,
    Sequences,
    TokenId,
)
from sluice.wire.params import Guide, RetentionParams, SamplingParams, Speculation, StopParams, TextParams
from sluice.wire.rows import PROMPT_END_TOKENS, Open, TextBatch, TokenBatch
from sluice.wire.tables import PromptTables
from sluice.wire.tensors import TensorBatch, TensorParams

MAX_KEEPERS = 2
"""Keepers that a request names."""
PROBATION_TOKENS = 4
"""New tokens per sequence beyond which an attempt has made progress, so that the request is not suspected of killing
its engine. More than 0, because the last rows are lost with an engine that dies: a retry may produce them again and die
at the same token."""


class Extras(msgspec.Struct, frozen=True, omit_defaults=True):
    """What optional features ask of a request's engine."""

    retention: RetentionParams = RetentionParams()
    speculation: Speculation = Speculation()
    guide: Guide | None = None
    client_id: Number | None = None
    """The caller's number for this request, which is passed to logits processors."""
    prompt_logprobs: Logprobs | None = None
    """Number of alternatives to report with each token of the prompt. None: no logprobs of the prompt. Not used with
    `resume`, since a caller that has tokens has received them already."""
    tensors: TensorParams | None = None
    adapter: Adapter | None = None
    """None: the model without an adapter."""
    tables: PromptTables | None = None
    kv_keepers: Annotated[list[Name], Meta(max_length=MAX_KEEPERS)] = []
    """Addresses of keepers on other machines that may have KV blocks of the request, the likeliest first."""


NO_EXTRAS = Extras()


class Submit(Message, frozen=True):
    """router → engine: one attempt at one request."""

    request: Number
    attempt: Count
    engine_epoch: Number
    """Epoch of the process that the message is meant for. Another process at the address drops it."""
    name: Name
    """The caller's request id, for logs."""
    prompt: list[TokenId]
    n: Sequences
    sampling: SamplingParams
    stopping: StopParams
    text: TextParams
    priority: Priority
    """Higher runs first: 1 low, 2 normal, 3 high."""
    salt: Salt
    time_limit: Seconds | None
    """Seconds from the receipt of this message."""
    detokenizer: Name
    """Address of the inbox for tokens."""
    router: Name
    """Address of the inbox for text."""
    resume: dict[Index, list[TokenId]] = {}
    """Tokens that the caller has already, by sequence. They count as generated and are not sent again."""
    ended: list[Index] = []
    """Sequences that ended in an earlier attempt and are not run again."""
    alone: bool = False
    """Quarantine: the engine runs no other request until this one has PROBATION_TOKENS + 1 new tokens or has ended."""
    tenant: Name = ""
    """Tenants take turns when their guides are compiled."""
    extras: Extras | None = None
    """None: the request uses no optional feature."""

    @property
    def remaining(self) -> list[int]:
        """Indexes of the sequences that did not end in an earlier attempt."""
        ended = set(self.ended)
        return [index for index in range(self.n) if index not in ended]

    @property
    def adapter_version(self) -> str | None:
        return None if self.extras is None or self.extras.adapter is None else self.extras.adapter.version

    def opening(self, cached_tokens: int = 0, queue: float = 0.0) -> Open:
        """The request's Open. `queue`: seconds that it waited for its first step."""
        return Open(
            request=self.request,
            attempt=self.attempt,
            n=self.n,
            text=self.text,
            router=self.router,
            prompt_tokens=len(self.prompt),
            cached_tokens=cached_tokens,
            queue=queue,
            resume=self.resume,
            ended=self.ended,
            prompt_end=list(self.prompt[-PROMPT_END_TOKENS:]),
        )


class Cancel(Message, frozen=True):
    """router → engine: end a request, or one of its sequences, with ABORTED. Unknown requests are ignored."""

    request: Number
    attempt: Count
    engine_epoch: Number
    sequence: Index | None = None


class Flush(Message, frozen=True):
    """router → engine: clear the prefix cache. The result is reported in `EngineHeartbeat.flushes`."""

    engine_epoch: Number
    number: Number
    """Random; identifies this flush in the heartbeats."""


class Drop(Message, frozen=True):
    """router → detokenizer: an attempt was abandoned and its state can be freed. Unknown attempts are ignored."""

    request: Number
    attempt: Count


ToEngine = Hello | Submit | Cancel | Flush | EngineCall | ReadCacheEvents | AdapterMessage | PromptAdapterMessage
ToDetokenizer = Hello | TokenBatch | KeepAlive | Drop
ToRouter = (
    TextBatch
    | EngineHeartbeat
    | DetokenizerHeartbeat
    | CallAnswer
    | AdapterLoaded
    | PromptAdapterRead
    | TensorBatch
    | KeepAlive
    | CacheEvents
)

SENDER: dict[type[Message], str] = {
    Hello: "router",
    Drop: "router",
    TokenBatch: "engine",
    KeepAlive: "engine",
    EngineHeartbeat: "engine",
    CallAnswer: "engine",
    AdapterLoaded: "engine",
    PromptAdapterRead: "engine",
    TensorBatch: "engine",
    CacheEvents: "engine",
    TextBatch: "detok",
    DetokenizerHeartbeat: "detok",
}
"""The role that sends each type of message to an inbox that admits the keys of several roles."""
MAX_BYTES = {"detok": 8 << 20}
"""Maximum size of a frame by the role of its sender, if that needs less than MAX_FRAME_BYTES. A batch of text with the
most log-probabilities has half of it."""
