"""Sections of the router's settings. A component of the router receives whole sections."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, Field

from sluice.settings.fields import (
    ByteCount,
    OtherVariable,
    PortNumber,
    PositiveInt,
    PositiveSeconds,
    PriorityAging,
    Range,
    Seconds,
)
from sluice.settings.process import TlsServer
from sluice.wire.adapters import ADAPTER_ID
from sluice.wire.params import DEFAULT_NAMES, default_problem


@dataclass(frozen=True)
class PeerSettings:
    """Peers"""

    engines: tuple[str, ...] = ()
    """Addresses of engine inboxes: tcp://host:port, ipc:///path, dns://name:port (resolved every 2 s), or file:///path
    of a file with one such address per line (read every 2 s)."""
    detokenizers: tuple[str, ...] = ()
    """Addresses of detokenizer inboxes, in the same forms as `engines`."""
    peer_timeout: PositiveSeconds = 5.0
    """Seconds without a heartbeat after which a peer is considered lost."""
    stall_timeout: PositiveSeconds = 30.0
    """Seconds without progress of its step loop after which an engine is considered lost even though its heartbeats
    arrive. Must be longer than its longest step."""
    ready_grace: Seconds = 30.0
    """Seconds that a router stays ready after it has lost its last engine or detokenizer. A draining router stops being
    ready immediately."""
    serving_version: Annotated[str, Field(max_length=253)] = ""
    """New requests are sent to engines with this `model_version`, unless none of them accepts work. Default: any
    version."""
    allow_mixed_models: bool = False
    """Treat engines with different weights, configuration or dtype as one model, even for a stream that moves from one
    engine to another."""


@dataclass(frozen=True)
class RecoverySettings:
    """Recovery"""

    peer_wait: Seconds = 5.0
    """Seconds that a new request waits for an available engine and detokenizer."""
    recovery_timeout: Seconds = 300.0
    """Seconds that a stream waits for another engine or detokenizer after losing one. Must be longer than an engine
    takes to load."""
    recovery_attempts: PositiveInt = 8
    """Number of consecutive attempts without a new token after which a request fails."""
    max_undelivered_tokens: PositiveInt = 4096
    """Maximum number of tokens of one stream that wait for a slow client. Beyond it, the stream pauses."""
    max_undelivered_bytes: ByteCount = 64 << 20
    """Maximum size of the model's tensors of one request that wait for a slow client. Beyond it, the stream pauses."""
    slow_client_timeout: PositiveSeconds = 900.0
    """Seconds that one write to a client may take before its stream ends with SLOW_CLIENT."""


@dataclass(frozen=True)
class ListenSettings(TlsServer):
    """Listening"""

    port: PortNumber = 50051
    """Port of the gRPC server. 0: any free port."""
    max_connection_age: Annotated[float, Range(ge=0, le=1e6)] = 0.0
    """Seconds, varied by ±10 %, after which a connection accepts no new calls, so that its client reconnects and finds
    new routers. 0: no limit."""
    max_connection_age_grace: Annotated[float | None, Range(ge=0, le=1e6)] = None
    """Seconds that calls may continue on a connection older than max_connection_age before they are cut off. Default:
    no limit."""
    tls_client_ca: str | None = None
    """PEM file with certificate authorities. Clients must present a certificate issued by one of them."""
    admin_host: str = "127.0.0.1"
    """Address to listen on for AdminService, if admin_port is set."""
    admin_port: Annotated[int | None, Range(ge=0, le=65535)] = None
    """Separate port for AdminService. 0: any free port. Default: AdminService shares the main port if callers of that
    port must authenticate or it listens on loopback; otherwise it is not served."""


@dataclass(frozen=True)
class TracingSettings:
    """Tracing"""

    otlp_endpoint: Annotated[
        str | None, Field(pattern="^https?://[^/]+/?$"), OtherVariable("OTEL_EXPORTER_OTLP_ENDPOINT")
    ] = None
    """OpenTelemetry collector to send a trace of each request to over gRPC, such as http://collector:4317. Also read
    from OTEL_EXPORTER_OTLP_ENDPOINT. Needs the extra `otel`. Default: no traces. See docs/metrics.md."""


@dataclass(frozen=True)
class AccessSettings:
    """Access"""

    tokens_file: str | None = None
    """File of bearer tokens, one "TOKEN TENANT [admin]" per line. Callers must send one of them."""
    admin_tokens_file: str | None = None
    """File of bearer tokens for the separate port of AdminService, used there instead of tokens_file."""
    auth: str | None = None
    """Your function, as module:function, that authenticates callers. See docs/operations.md."""
    auth_timeout: PositiveSeconds = 5.0
    """Seconds that the `auth` function may take before the call fails with AUTH_UNAVAILABLE."""
    tenant_key: Annotated[str, Field(pattern="^[a-z][a-z0-9_.-]*$")] = "x-sluice-tenant"
    """gRPC metadata key with which a caller names its tenant. If tokens are used, it must match the token's tenant."""

    @property
    def authenticates(self) -> bool:
        """Whether callers of the main port must authenticate."""
        return self.tokens_file is not None or self.auth is not None


def _check_weights(weights: dict[str, float]) -> dict[str, float]:
    for tenant, weight in weights.items():
        if not 0.001 <= weight <= 1000.0:
            raise ValueError(f"the weight of {tenant!r} must be from 0.001 to 1000 (got {weight:g})")
    return weights


@dataclass(frozen=True)
class AdmissionSettings(PriorityAging):
    """Admission"""

    max_live: PositiveInt = 4096
    """Maximum number of admitted requests. Lower if the engines can hold fewer."""
    max_waiting: Annotated[int, Range(ge=0)] = 1024
    """Maximum number of requests that wait for admission. Further requests are refused with OVERLOADED."""
    max_waiting_tokens: Annotated[int, Range(ge=0)] = 4_000_000
    """Maximum number of tokens, in prompts and `resume`, of all requests that wait for admission. Further requests are
    refused with OVERLOADED."""
    max_tenant_waiting: Annotated[int | None, Range(ge=0)] = None
    """Maximum number of requests of one tenant that wait for admission. Default: three quarters of max_waiting."""
    tenant_weights: Annotated[dict[str, float], AfterValidator(_check_weights)] = field(default_factory=dict)
    """Relative shares of tenants, such as {"search": 2, "batch": 0.5}. Tenants that are not listed have a share of 1.
    """
    tenant_reserved_fraction: Annotated[float, Range(ge=0, lt=1)] = 0.1
    """Fraction of the slots in the engines' batches that is reserved for tenants below their share."""

    @property
    def tenant_waiting(self) -> int:
        """Maximum number of requests of one tenant that wait for admission."""
        return self.max_waiting * 3 // 4 if self.max_tenant_waiting is None else self.max_tenant_waiting


def check_default_sampling(defaults: dict[str, float]) -> dict[str, float]:
    for name, value in defaults.items():
        if name not in DEFAULT_NAMES:
            raise ValueError(f"{name!r} must be one of {', '.join(DEFAULT_NAMES)}")
        if problem := default_problem(name, value):
            raise ValueError(f"{name} {problem}")
    return defaults


def _check_adapters(adapters: dict[str, str]) -> dict[str, str]:
    for name, path in adapters.items():
        if not ADAPTER_ID.fullmatch(name) or not path:
            raise ValueError(
                f"{name!r}: {path!r} must be an adapter id (1 to 256 characters from [A-Za-z0-9._:/-]) and its folder"
            )
    return adapters


@dataclass(frozen=True)
class AdapterSettings:
    """Loading of LoRA adapters and prompt adapters"""

    lora_adapters: Annotated[dict[str, str], AfterValidator(_check_adapters)] = field(default_factory=dict)
    """LoRA adapters to load at startup, by id, such as {"sql": "/adapters/sql"}. The folders are on the engines'
    machines. See docs/lora.md."""
    lora_in_requests: bool = False
    """Allow requests to carry the weights of a LoRA adapter (`lora_weights`)."""
    lora_upload_memory: ByteCount = 1 << 30
    """Memory for the files of uploaded LoRA adapters, which the router sends to engines that do not have them."""
    prompt_adapters: Annotated[dict[str, str], AfterValidator(_check_adapters)] = field(default_factory=dict)
    """Prompt adapters to load at startup, by id, such as {"terse": "/prompts/terse"}. The folders are on this machine,
    inside one of prompt_adapter_folders. See docs/prompt_tables.md."""
    prompt_adapter_folders: tuple[str, ...] = ()
    """Folders on this machine from which prompt adapters may be loaded. Default: they can only be uploaded."""


@dataclass(frozen=True)
class ClientLimits:
    """Client limits"""

    max_open: PositiveInt = 16_384
    """Maximum number of open requests, including those whose clients do not read their responses."""
    max_tenant_requests: Annotated[int | None, Range(ge=1)] = None
    """Maximum number of open requests of one tenant. Default: no limit."""
    max_connections: PositiveInt = 4096
    """Maximum number of open gRPC connections."""
    max_message_bytes: Annotated[int, Range(ge=1 << 16)] = 16 << 20
    """Maximum size in bytes of a gRPC message from a client."""
    max_prompt_bytes: Annotated[int | None, Range(ge=1)] = None
    """Maximum size in bytes of a text prompt. Default: 32 bytes per token of the model's context length, but at least
    64 KiB and at most 8 MiB."""
    max_n: Annotated[int, Range(ge=1, le=128)] = 128
    """Maximum number of outputs (`n`) per request."""
