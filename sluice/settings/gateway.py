"""Settings of the HTTP gateway."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated

from sluice.host.ports import Port
from sluice.settings.fields import ByteCount, PortNumber, PositiveInt, PositiveSeconds, Range
from sluice.settings.process import STRICT, ProcessSettings, TlsServer


@dataclass(frozen=True)
class RouterAccess:
    """Routers"""

    routers: Annotated[tuple[str, ...], Field(min_length=1)] = ("127.0.0.1:50051",)
    """Addresses of routers: host:port, or any address that gRPC can resolve, such as dns:///sluice-router:50051. If a
    router fails, its streams continue at the next one."""
    router_ca: str | None = None
    """PEM file with the certificate authorities that issue the routers' certificates. Enables TLS to the routers."""
    router_certificate: str | None = None
    """PEM file with the client certificate that the gateway presents to routers."""
    router_key: str | None = None
    """PEM file with the private key of router_certificate."""
    retry_timeout: Annotated[float, Range(ge=0)] = 0.0
    """Seconds for which a request that no router accepts is retried before the client receives the error."""
    resume_timeout: Annotated[float, Range(ge=0)] = 60.0
    """Seconds without a new token for which the gateway tries to resume a broken stream. Also the time that requests
    wait while no router is reachable."""


@dataclass(frozen=True)
class HttpSettings:
    """HTTP"""

    port: PortNumber = 8000
    """Port of the HTTP server. 0: any free port."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server from a browser, such as https://chat.example.com. *: any origin."""
    max_connections: PositiveInt = 4096
    """Maximum number of open connections of this gateway. Beyond it, the connection that has waited longest for a
    complete request is closed; if all have requests in progress, further requests are answered with 503."""
    max_requests: PositiveInt = 2048
    """Maximum number of requests in progress at this gateway, counted from the end of their body. Further requests are
    answered with 429."""
    max_body_bytes: Annotated[ByteCount, Range(ge=1 << 10)] = 8 << 20
    """Maximum size of a request body. Requests with a larger body are answered with 413."""
    max_bodies_bytes: Annotated[ByteCount, Range(ge=2 << 10)] | None = None
    """Maximum size of the bodies of all requests that this gateway is receiving or processing. Several gateways have
    this budget each. One token, or one address if the
    routers accept calls without a token, may have half of it. Further requests are answered with 429. Default: 16
    times max_body_bytes."""
    slow_client_timeout: PositiveSeconds = 900.0
    """Seconds that a client may go without reading anything of its response before its connection is closed."""


@dataclass(frozen=True)
class Parsers:
    """Tool calls and reasoning"""

    tool_parser: Literal["hermes"] | None = None
    """Format of the model's tool calls. hermes: the format of Qwen and Hermes models. Default: requests with tools are
    refused."""
    reasoning_parser: Literal["qwen3", "deepseek_r1"] | None = None
    """Format of the model's reasoning, which is returned as `reasoning_content`. qwen3: between `<think>` and
    `</think>`. deepseek_r1: everything up to `</think>`. Default: reasoning is left in the text."""


@validated(frozen=True, kw_only=True, config=STRICT)
class GatewaySettings(Parsers, HttpSettings, TlsServer, RouterAccess, ProcessSettings):
    """Gateway"""

    role: ClassVar[str] = "gateway"
    module: ClassVar[str] = "gateway"
    summary: ClassVar[str] = "Serves the OpenAI HTTP API as a client of routers."

    @property
    def body_budget(self) -> int:
        """Bytes for all bodies together."""
        return 16 * self.max_body_bytes if self.max_bodies_bytes is None else self.max_bodies_bytes

    @model_validator(mode="after")
    def _check_bodies(self) -> Self:
        if self.body_budget < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes must be at least twice max_body_bytes, which is {self.max_body_bytes} "
                f"(got {self.max_bodies_bytes})"
            )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        self.check_exposure({"host": self.host})
        if (self.router_certificate is None) != (self.router_key is None):
            raise ValueError("router_certificate and router_key must be set together")
        if self.router_certificate is not None and self.router_ca is None:
            raise ValueError("router_certificate needs router_ca")
        return self

    @property
    def ports(self) -> list[Port]:
        return [Port("port", self.host, self.port), *super().ports]
