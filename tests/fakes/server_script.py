"""What the fake server of `tests.fakes.server` answers, and what it has received."""

import threading
from dataclasses import dataclass, field
from typing import Any

from grpc_health.v1 import health_pb2

from sluice.v1 import admin_pb2, sampling_pb2
from tests.fakes.failures import Failure


@dataclass
class Script:
    """The answers of the server, which tests set, and what it has received."""

    texts: list[str] = field(default_factory=lambda: ["Hello", ", ", "world"])
    failure: Failure | None = None
    fail_after: int | None = None
    """Number of deltas before the failure; None: the call fails immediately."""
    stop_string: str | None = None
    """The stop string that ends streams; None: they end with LENGTH."""
    prompt_tail: str = ""
    hangs: bool = False
    """Calls that begin now block after their deltas, until the client disconnects or aborts, or this is False again."""
    hanging: list[str] = field(default_factory=list)
    """Ids of requests that block or have blocked."""
    aborted: set[str] = field(default_factory=set)
    """Ids of requests that were aborted."""
    lose_event: bool = False
    """Skip a sequence number after the first event, as if an event were lost."""
    omit_done: bool = False
    seen: list[Any] = field(default_factory=list)
    """All requests, in order."""
    metadata: list[dict[str, Any]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when a stream ends, for whatever reason."""
    health: dict[str, int] = field(default_factory=lambda: {"": health_pb2.HealthCheckResponse.SERVING})
    capabilities: list[str] = field(default_factory=lambda: ["chat"])
    """Capabilities of the model."""
    default_sampling: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    """Default of the model."""
    no_stats: Failure | None = None
    """If set, calls for statistics fail with it, and no other calls do."""
    stats: admin_pb2.Stats = field(default_factory=admin_pb2.Stats)
    rank_answers: list[admin_pb2.RankAnswer] = field(default_factory=list)
    """The answer of CallEngines."""
    info: admin_pb2.GetServerInfoResponse = field(default_factory=admin_pb2.GetServerInfoResponse)
    """The answer of GetServerInfo. SetServingVersion changes its version."""
    loras: dict[str, admin_pb2.Lora] = field(default_factory=dict)
    """By id. LoadLora, UploadLora and UnloadLora change them."""
    max_loras: int = 1024
    checks_loras: bool = False
    """Requests with an unknown lora_id or prompt_adapter_id are refused."""
    uploads: dict[str, list[bytes]] = field(default_factory=dict)
    """The latest upload of each id: adapter_config.json, then the parts of the weights."""
    keeps_uploads: bool = True
    """Whether `uploads` stores the weights."""
    prompt_adapters: dict[str, admin_pb2.PromptAdapter] = field(default_factory=dict)
    """By id. LoadPromptAdapter and UnloadPromptAdapter change them."""
    steps: list[admin_pb2.StreamStepsResponse] = field(default_factory=list)
    """The messages of StreamSteps, which then stays open."""
    cache_events: list[admin_pb2.StreamCacheEventsResponse] = field(default_factory=list)
    """The messages of StreamCacheEvents, which then stays open."""
