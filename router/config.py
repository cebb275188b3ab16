"""Settings of the router, read here and nowhere else."""

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from sluice.ring.ports import Port
from sluice.ring.settings import ServiceSettings, load_settings

ENVIRONMENT = "SLUICE_ROUTER_"
PROMPT_BYTES_PER_TOKEN = 32
SMALLEST_PROMPT_BYTES = 64 << 10
LARGEST_PROMPT_BYTES = 8 << 20
SMALLEST_PROMPT_IDS = 1 << 16
"""So many ids are taken even for a short context: truncate_prompt_tokens may cut them."""


class RouterSettings(ServiceSettings):
    """Takes gRPC calls and sends them round the ring. Knows engines and detokenizers by address."""

    model: str = Field(description="folder or hub id of the model; its config and tokenizer files are read, no weights")
    name: str | None = Field(None, description="served name of the model; default: the folder's")
    revision: str | None = Field(None, min_length=1, description="branch, tag or commit of a hub model; default: main")
    engines: tuple[str, ...] = Field(
        (), description="engine inboxes: tcp://host:port, ipc:///path, or dns://name:port, resolved again and again"
    )
    detokenizers: tuple[str, ...] = Field((), description="detokenizer inboxes, written like those of engines")
    host: str = Field("127.0.0.1", description="interface of the gRPC server; others than loopback need TLS")
    port: int = Field(50051, ge=0, le=65535, description="port of the gRPC server; 0: any")
    insecure: bool = Field(False, description="listen beyond this machine without TLS: behind a proxy or a mesh")
    tls_certificate: str | None = Field(None, description="PEM file: the server's certificate, then its chain")
    tls_key: str | None = Field(None, description="PEM file: its key")
    tls_client_ca: str | None = Field(None, description="PEM file: clients need a certificate that one of these issued")
    tokens_file: str | None = Field(None, description="bearer tokens, lines TOKEN TENANT [admin]: only they may call")
    auth: str | None = Field(None, description="your module:function that says who calls; see docs/operations.md")
    auth_timeout: float = Field(5.0, gt=0, description="seconds it has")
    tenant_key: str = Field(
        "x-sluice-tenant",
        pattern="^[a-z][a-z0-9_.-]*$",
        description="metadata key that says whose a call is; with tokens it is the token that does",
    )
    admin_host: str = Field("127.0.0.1", description="interface of AdminService, where it has a port of its own")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port for AdminService alone; 0: any; default: the main port, where that is safe",
    )
    admin_tokens_file: str | None = Field(None, description="tokens for that port, in place of the other ones")
    reload_interval: float = Field(1.0, gt=0, description="seconds between two looks at certificates and tokens")
    listen: str = Field(
        "tcp://127.0.0.1:*", description="address of the ring inbox: ipc:///path or tcp://host:port (port *: any)"
    )
    advertise: str | None = Field(None, description="address by which others reach the inbox; default: the bound one")
    id: str = Field(
        default_factory=lambda: f"router-{socket.gethostname()}-{os.getpid()}", description="name of this process"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    metrics_host: str = Field("127.0.0.1", description="interface on which /metrics, /livez and /readyz answer")
    metrics_port: int = Field(0, ge=0, le=65535, description="port for that; 0: none")
    ready_stall: float = Field(
        30.0, gt=0, description="seconds that its event loop may stand still until /readyz says no"
    )
    live_stall: float = Field(120.0, gt=0, description="seconds that it may stand still until /livez says no")
    drain_timeout: float = Field(10.0, ge=0, description="seconds that live requests have to end after SIGTERM")

    max_open: int = Field(16_384, ge=1, description="requests open at most, those of clients that do not read included")
    max_live: int = Field(4096, ge=1, description="requests on the ring at most; engines may hold fewer")
    max_waiting: int = Field(1024, ge=0, description="requests waiting for admission at most; more get OVERLOADED")
    max_waiting_tokens: int = Field(
        4_000_000, ge=0, description="tokens of prompts and resume that wait for admission at most"
    )
    priority_aging_seconds: float = Field(
        30.0, ge=0, le=1e9, description="in which a request that waits gains one priority class; 0: never"
    )
    tenant_weights: dict[str, float] = Field(
        default_factory=dict, description="tenants with more or less than one share of the service, as JSON or YAML"
    )
    tenant_kept_part: float = Field(
        0.1, ge=0, lt=1, description="of the engines' batches, kept for tenants that hold less than their share"
    )
    max_tenant_waiting: int | None = Field(
        None, ge=0, description="requests of one tenant that wait at most; default: three quarters of max_waiting"
    )
    max_tenant_requests: int | None = Field(
        None, ge=1, description="requests of one tenant at a time, also those that it does not read; default: any"
    )
    peer_timeout: float = Field(5.0, gt=0, description="seconds without a heartbeat after which a peer is lost")
    peer_wait: float = Field(5.0, ge=0, description="seconds a request waits for an engine and a detokenizer")
    stall_timeout: float = Field(
        30.0, gt=0, description="seconds after which an engine that heartbeats but makes no turn of its loop is lost"
    )
    recovery_timeout: float = Field(
        300.0, ge=0, description="seconds a stream that lost its engine or detokenizer waits for others"
    )
    recovery_attempts: int = Field(
        8, ge=1, description="attempts in a row that may bring no new token before a request fails"
    )
    max_undelivered_tokens: int = Field(
        4096, ge=1, description="tokens of a stream that wait for its client at most; beyond it the stream pauses"
    )
    slow_client_timeout: float = Field(
        900.0, gt=0, description="seconds one write to a client may take before its stream ends with SLOW_CLIENT"
    )
    allow_mixed_models: bool = Field(
        False, description="use engines with different weights, configuration or dtype as one, also within a stream"
    )
    resolve_interval: float = Field(5.0, gt=0, description="seconds between two look-ups of the peers' names")
    cached_blocks: int = Field(65_536, ge=0, description="block hashes remembered per engine, for placement")

    text_threads: int = Field(2, ge=1, description="threads that tokenize")
    max_texts: int = Field(1024, ge=1, description="texts waiting for those threads at most; more get OVERLOADED")
    max_text_bytes: int = Field(64 << 20, ge=1, description="bytes of those at most, but for one that waits alone")
    max_message_bytes: int = Field(16 << 20, ge=1 << 16, description="largest gRPC message taken")
    max_metadata_bytes: int = Field(16 << 10, ge=1 << 12, description="largest metadata of a call")
    max_streams: int = Field(4096, ge=1, description="calls at a time on one connection; more wait at the client")
    max_connections: int = Field(4096, ge=1, description="gRPC connections at a time")
    max_prompt_bytes: int | None = Field(
        None, ge=1, description="largest text prompt; default: 32 bytes per token of the model's context, up to 8 MiB"
    )
    max_n: int = Field(128, ge=1, le=128, description="outputs per request at most")
    max_logprobs: int = Field(20, ge=0, le=20, description="alternatives per token at most")
    max_stop_strings: int = Field(32, ge=0, description="stop strings per request at most")
    max_stop_bytes: int = Field(1024, ge=1, description="bytes of one stop string at most")
    max_logit_bias: int = Field(1024, ge=0, description="logit_bias entries at most")
    max_guide_bytes: int = Field(65_536, ge=0, description="bytes of a regex, schema, grammar or all choices at most")
    max_listed_ids: int = Field(16_384, ge=0, description="ids in bad, allowed or stop_token_ids at most")
    max_messages: int = Field(4096, ge=1, description="messages of a chat at most")
    max_salt_bytes: int = Field(256, ge=0, le=1 << 16, description="bytes of kv_cache.salt at most")
    max_retention_ranges: int = Field(64, ge=0, description="ranges in kv_cache.prompt_retention at most")
    max_retention_time: float = Field(
        2_592_000.0, gt=0, description="largest duration in kv_cache, in seconds; default: 30 days"
    )
    max_time_limit: float = Field(86_400.0, gt=0, description="largest time_limit, in seconds")

    @model_validator(mode="after")
    def _check_listeners(self) -> "RouterSettings":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if self.admin_tokens_file is not None and self.admin_port is None:
            raise ValueError("admin_tokens_file needs admin_port")
        for name, host in self.listeners.items():
            if not (is_loopback(host) or self.tls_certificate or self.insecure):
                raise ValueError(
                    f"{name} {host} can be reached from other machines: "
                    "give tls_certificate and tls_key, or set insecure where something else protects it"
                )
        if self.admin_port is not None and not (
            is_loopback(self.admin_host) or self.authenticates or self.admin_tokens_file
        ):
            raise ValueError(f"admin_host {self.admin_host} can be reached from other machines: give admin_tokens_file")
        return self

    @property
    def listeners(self) -> dict[str, str]:
        """Interfaces of the gRPC servers, by setting."""
        return {"host": self.host} | ({} if self.admin_port is None else {"admin_host": self.admin_host})

    @property
    def ports(self) -> list[Port]:
        """That it listens on, for clients and for probes."""
        return [
            Port("port", self.host, self.port),
            Port("admin_port", self.admin_host, self.admin_port or 0),
            Port("metrics_port", self.metrics_host, self.metrics_port),
        ]

    @property
    def authenticates(self) -> bool:
        """Callers of the main port have to say who they are."""
        return self.tokens_file is not None or self.auth is not None

    @property
    def admin_on_main(self) -> bool:
        """AdminService is on the main port: it has none of its own, and strangers cannot call it there."""
        return self.admin_port is None and (self.authenticates or is_loopback(self.host))

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for tenant, weight in weights.items():
            if not 0.001 <= weight <= 1000.0:
                raise ValueError(f"the weight of {tenant!r} must be from 0.001 to 1000")
        return weights

    @property
    def bounds(self) -> "Bounds":
        """Of requests that wait for admission."""
        tenant_waiting = self.max_waiting * 3 // 4 if self.max_tenant_waiting is None else self.max_tenant_waiting
        return Bounds(self.max_waiting, self.max_waiting_tokens, tenant_waiting)

    def limits(self, context_tokens: int) -> "Limits":
        """The bounds of one request, for a model with this longest context."""
        by_context = min(max(context_tokens * PROMPT_BYTES_PER_TOKEN, SMALLEST_PROMPT_BYTES), LARGEST_PROMPT_BYTES)
        return Limits(
            prompt_bytes=self.max_prompt_bytes or by_context,
            prompt_ids=max(4 * context_tokens, SMALLEST_PROMPT_IDS),
            n=self.max_n,
            logprobs=self.max_logprobs,
            stop_strings=self.max_stop_strings,
            stop_bytes=self.max_stop_bytes,
            logit_bias=self.max_logit_bias,
            guide_bytes=self.max_guide_bytes,
            listed_ids=self.max_listed_ids,
            messages=self.max_messages,
            salt_bytes=self.max_salt_bytes,
            retention_ranges=self.max_retention_ranges,
            retention_time=self.max_retention_time,
            time_limit=self.max_time_limit,
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of those that wait."""

    waiting: int
    waiting_tokens: int
    """Tokens of their prompts and of what they resume."""
    tenant_waiting: int | None = None
    """Requests of one tenant that wait; None: as many as of all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest values that one request may ask for."""

    prompt_bytes: int
    prompt_ids: int
    n: int
    logprobs: int
    stop_strings: int
    stop_bytes: int
    logit_bias: int
    guide_bytes: int
    listed_ids: int
    messages: int
    salt_bytes: int
    retention_ranges: int
    retention_time: float
    """Seconds."""
    time_limit: float
    """Seconds."""


def read_settings(argv: Sequence[str] | None = None) -> RouterSettings:
    """From flags, environment (SLUICE_ROUTER_…), YAML file, defaults. Ends the process on bad input."""
    return load_settings(RouterSettings, "python -m router", ENVIRONMENT, argv)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
