"""Sections of the router's settings, which its parts take whole."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, Field

from sluice.ring.adapters import ADAPTER_ID
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


@dataclass(frozen=True)
class PeerSettings:
    """Peers"""

    engines: tuple[str, ...] = ()
    """Engine inboxes: tcp://host:port, ipc:///path, dns://name:port, which is resolved every 2 s, or file:///path of a
    list of these, one a line, which is read every 2 s."""
    detokenizers: tuple[str, ...] = ()
    """Detokenizer inboxes, written like those of engines."""
    peer_timeout: PositiveSeconds = 5.0
    """Seconds without a heartbeat after which a peer is lost."""
    stall_timeout: PositiveSeconds = 30.0
    """Seconds without progress of its loop after which an engine is lost although its heartbeats arrive. More than its
    longest step."""
    ready_grace: Seconds = 30.0
    """Seconds that a router which was ready stays so without an engine or a detokenizer. A drain ends it at once."""
    serving_version: Annotated[str, Field(max_length=253)] = ""
    """`model_version` of the engines that new requests go to, while one of them takes work; default: any."""
    allow_mixed_models: bool = False
    """Treat engines with different weights, configuration or dtype as one model, also within a stream."""


@dataclass(frozen=True)
class RecoverySettings:
    """Recovery"""

    peer_wait: Seconds = 5.0
    """Seconds that a new request waits for an engine and a detokenizer."""
    recovery_timeout: Seconds = 300.0
    """Seconds that a stream waits for a new engine or detokenizer after a loss. More than an engine takes to load."""
    recovery_attempts: PositiveInt = 8
    """Consecutive attempts without a new token before a request fails."""
    max_undelivered_bytes: ByteCount = 64 << 20
    """The same for tensors of the model."""
    max_undelivered_tokens: PositiveInt = 4096
    """Tokens of a stream that wait for a slow client; beyond it the stream pauses."""
    slow_client_timeout: PositiveSeconds = 900.0
    """Seconds that one write to a client may take; then its stream ends with SLOW_CLIENT."""


@dataclass(frozen=True)
class ListenSettings:
    """Listening"""

    host: str = "127.0.0.1"
    """Interface of the gRPC server; any other than loopback needs TLS or `insecure`."""
    port: PortNumber = 50051
    """Port of the gRPC server; 0: any."""
    insecure: bool = False
    """Listen beyond this machine without TLS: behind a proxy or a mesh."""
    max_connection_age: Annotated[float, Range(ge=0, le=1e6)] = 0.0
    """Seconds, varied by 10 %, after which a connection takes no new calls: its client finds new routers; 0: never."""
    max_connection_age_grace: Annotated[float | None, Range(ge=0, le=1e6)] = None
    """Seconds that calls of such a connection may still take; default: any time."""
    tls_certificate: str | None = None
    """PEM file: the certificate of the server, then its chain."""
    tls_key: str | None = None
    """PEM file: the private key of the server."""
    tls_client_ca: str | None = None
    """PEM file: clients need a certificate that one of these authorities issued."""
    admin_host: str = "127.0.0.1"
    """Interface of AdminService, if it has a port of its own."""
    admin_port: Annotated[int | None, Range(ge=0, le=65535)] = None
    """Port for AdminService alone; 0: any; default: the main port, if that is safe."""


@dataclass(frozen=True)
class TracingSettings:
    """Tracing"""

    otlp_endpoint: Annotated[
        str | None, Field(pattern="^https?://[^/]+/?$"), OtherVariable("OTEL_EXPORTER_OTLP_ENDPOINT")
    ] = None
    """OpenTelemetry collector that gets a trace of each request, such as http://collector:4317 (gRPC). Also read from
    OTEL_EXPORTER_OTLP_ENDPOINT; default: no traces. Needs the extra `otel`; see docs/metrics.md."""


@dataclass(frozen=True)
class AccessSettings:
    """Access"""

    tokens_file: str | None = None
    """Bearer tokens, lines TOKEN TENANT [admin]: only they may call."""
    admin_tokens_file: str | None = None
    """Tokens for the port of AdminService, in place of the others."""
    auth: str | None = None
    """Your module:function that authenticates callers; see docs/operations.md."""
    auth_timeout: PositiveSeconds = 5.0
    """Seconds that this function may take."""
    tenant_key: Annotated[str, Field(pattern="^[a-z][a-z0-9_.-]*$")] = "x-sluice-tenant"
    """Metadata key that names the tenant of a call. With tokens, the token names it."""

    @property
    def authenticates(self) -> bool:
        """Whether callers of the main port have to prove who they are."""
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
    """Requests on the ring; fewer if the engines hold fewer."""
    max_waiting: Annotated[int, Range(ge=0)] = 1024
    """Requests that wait for admission; more are refused with OVERLOADED."""
    max_waiting_tokens: Annotated[int, Range(ge=0)] = 4_000_000
    """Tokens of the prompts and the `resume` of those."""
    max_tenant_waiting: Annotated[int | None, Range(ge=0)] = None
    """Requests of one tenant that wait; default: three quarters of max_waiting."""
    tenant_weights: Annotated[dict[str, float], AfterValidator(_check_weights)] = field(default_factory=dict)
    """Shares of tenants that have more or less than 1, such as {"search": 2, "batch": 0.5}."""
    tenant_reserved_fraction: Annotated[float, Range(ge=0, lt=1)] = 0.1
    """Of the places in the engines' batches: reserved for tenants that hold less than their share."""

    @property
    def tenant_waiting(self) -> int:
        """Requests of one tenant that may wait."""
        return self.max_waiting * 3 // 4 if self.max_tenant_waiting is None else self.max_tenant_waiting


def _check_adapters(adapters: dict[str, str]) -> dict[str, str]:
    for name, path in adapters.items():
        if not ADAPTER_ID.fullmatch(name) or not path:
            raise ValueError(f"{name!r}: {path!r} must be an id, up to 256 of [A-Za-z0-9._:/-], and a folder")
    return adapters


@dataclass(frozen=True)
class AdapterSettings:
    """Loading of LoRA adapters and prompt adapters"""

    lora_adapters: Annotated[dict[str, str], AfterValidator(_check_adapters)] = field(default_factory=dict)
    """Adapters that are loaded from the start, such as {"sql": "/adapters/sql"}: folders on the engines' machines. See
    docs/lora.md."""
    lora_in_requests: bool = False
    """Whether requests may bring adapters (`lora_weights`)."""
    lora_upload_memory: ByteCount = 1 << 30
    """Memory for the files of uploaded adapters, from which engines that lack them get them."""
    prompt_adapters: Annotated[dict[str, str], AfterValidator(_check_adapters)] = field(default_factory=dict)
    """Prompt adapters that are loaded from the start, such as {"terse": "/prompts/terse"}: folders on this machine, in
    `prompt_adapter_folders`. See docs/prompt_tables.md."""
    prompt_adapter_folders: tuple[str, ...] = ()
    """Folders on this machine from which prompt adapters may be loaded. Empty: they can only be uploaded."""


@dataclass(frozen=True)
class ClientLimits:
    """Limits of clients"""

    max_open: PositiveInt = 16_384
    """Open requests, including those whose clients do not read."""
    max_tenant_requests: Annotated[int | None, Range(ge=1)] = None
    """Open requests of one tenant; default: any number."""
    max_connections: PositiveInt = 4096
    """gRPC connections."""
    max_message_bytes: Annotated[int, Range(ge=1 << 16)] = 16 << 20
    """Largest gRPC message that is accepted."""
    max_prompt_bytes: Annotated[int | None, Range(ge=1)] = None
    """Largest text prompt; default: 32 bytes per token of the model's context, at least 64 KiB, at most 8 MiB."""
    max_n: Annotated[int, Range(ge=1, le=128)] = 128
    """Outputs per request."""
