"""Settings of the HTTP gateway."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated

from sluice.ring.ports import Port
from sluice.settings.fields import ByteCount, PortNumber, PositiveInt, PositiveSeconds, Range
from sluice.settings.process import STRICT, ProcessSettings, is_loopback


@dataclass(frozen=True)
class RouterAccess:
    """Routers"""

    routers: Annotated[tuple[str, ...], Field(min_length=1)] = ("127.0.0.1:50051",)
    """Addresses of routers, host:port or what gRPC resolves, such as dns:///sluice-router:50051. After a failure the
    next one is used, and streams go on there."""
    router_ca: str | None = None
    """PEM file: authorities that the routers' certificates are issued by. With it connections to routers use TLS."""
    router_certificate: str | None = None
    """PEM file: the certificate that the gateway shows to routers."""
    router_key: str | None = None
    """PEM file: the private key of that certificate."""
    retry_timeout: Annotated[float, Range(ge=0)] = 0.0
    """Seconds that a request which no router accepts is tried again, before its client gets the error."""
    resume_timeout: Annotated[float, Range(ge=0)] = 60.0
    """Seconds that a broken stream without new tokens is resumed, and that requests wait for routers that are gone."""


@dataclass(frozen=True)
class HttpSettings:
    """HTTP"""

    host: str = "127.0.0.1"
    """Interface of the HTTP server; any other than loopback needs TLS or `insecure`."""
    port: PortNumber = 8000
    """Port of the HTTP server; 0: any."""
    insecure: bool = False
    """Listen beyond this machine without TLS: behind a proxy or a mesh."""
    tls_certificate: str | None = None
    """PEM file: the certificate of the server, then its chain."""
    tls_key: str | None = None
    """PEM file: the private key of the server."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser, such as https://chat.example.com; *: any. Empty: none."""
    max_connections: PositiveInt = 4096
    """Open connections; requests on others are answered with 503."""
    max_requests: PositiveInt = 2048
    """Requests in progress; more are answered with 429."""
    max_body_bytes: Annotated[ByteCount, Range(ge=1 << 10)] = 8 << 20
    """Largest request body; larger ones are answered with 413."""
    slow_client_timeout: PositiveSeconds = 900.0
    """Seconds that a client may take nothing of what is sent to it; then its connection is closed."""


@dataclass(frozen=True)
class Parsers:
    """What the model writes beside text"""

    tool_parser: Literal["hermes"] | None = None
    """How the model writes tool calls; hermes: Qwen, Hermes. Default: requests with tools are refused."""
    reasoning_parser: Literal["qwen3", "deepseek_r1"] | None = None
    """How it writes its reasoning, which becomes `reasoning_content`; qwen3: between <think> and </think>; deepseek_r1:
    until </think>. Default: it stays in the text."""


@validated(frozen=True, kw_only=True, config=STRICT)
class GatewaySettings(Parsers, HttpSettings, RouterAccess, ProcessSettings):
    """Gateway"""

    role: ClassVar[str] = "gateway"
    module: ClassVar[str] = "gateway"
    summary: ClassVar[str] = "Serves the OpenAI HTTP API as a client of routers."

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        if (self.router_certificate is None) != (self.router_key is None):
            raise ValueError("router_certificate and router_key go together")
        if self.router_certificate is not None and self.router_ca is None:
            raise ValueError("router_certificate needs router_ca")
        if not (is_loopback(self.host) or self.tls_certificate or self.insecure):
            raise ValueError(
                f"host {self.host} can be reached from other machines: "
                "give tls_certificate and tls_key, or set insecure if a proxy or a mesh protects it"
            )
        return self

    @property
    def ports(self) -> list[Port]:
        return [Port("port", self.host, self.port), *super().ports]
