"""Settings that every service has (its name, logs and metrics port), and those of a port that clients connect to."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from sluice.host.ports import Port
from sluice.settings.fields import PortNumber, PositiveSeconds, Seconds

STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Monitoring:
    """Logs, metrics and health"""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""
    metrics_host: str = "127.0.0.1"
    """Address on which the status page, /metrics, /livez and /readyz are served."""
    metrics_port: PortNumber = 0
    """Port on which the status page, /metrics, /livez and /readyz are served. 0: they are not served."""
    ready_stall: PositiveSeconds = 30.0
    """Seconds that the main loop may be stuck, or requests may make no progress, before /readyz fails."""
    live_stall: PositiveSeconds = 120.0
    """Seconds that the main loop may be stuck before /livez fails."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(Monitoring):
    """Process"""

    role: ClassVar[str]
    module: ClassVar[str]
    """The module to run with `python -m`."""
    summary: ClassVar[str]
    """One sentence for `--help`."""

    config: str | None = None
    """YAML file with settings. Flags and environment variables take precedence over it."""
    id: str = ""
    """Name of this process in logs and heartbeats. Default: role, host name and process id."""
    drain_timeout: Seconds = 10.0
    """Seconds that requests in progress have to finish after SIGTERM."""

    @classmethod
    def prefix(cls) -> str:
        """Prefix of the service's environment variables."""
        return f"SLUICE_{cls.role.upper()}_"

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", f"{self.role}-{socket.gethostname()}-{os.getpid()}")

    @property
    def model_name(self) -> str:
        """Name or location of the model that the service serves. Empty for a service without a model."""
        return ""

    @property
    def ports(self) -> list[Port]:
        """TCP ports that the service listens on, without the port of its ring inbox."""
        return [Port("metrics_port", self.metrics_host, self.metrics_port)]


@dataclass(frozen=True)
class TlsServer:
    """Access from other machines"""

    host: str = "127.0.0.1"
    """Address to listen on. Any address other than loopback needs TLS or `insecure`."""
    insecure: bool = False
    """Accept connections from other machines without TLS, for a server behind a proxy or in a service mesh."""
    tls_certificate: str | None = None
    """PEM file with the server's certificate, followed by its chain. Enables TLS."""
    tls_key: str | None = None
    """PEM file with the private key of tls_certificate."""

    def check_exposure(self, hosts: Mapping[str, str]) -> None:
        """Raises ValueError if other machines could reach the server without TLS. `hosts`: hosts by setting name."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key must be set together")
        for name, host in hosts.items():
            if not (is_loopback(host) or self.tls_certificate or self.insecure):
                raise ValueError(
                    f"{name} {host} can be reached from other machines: "
                    "set tls_certificate and tls_key, or set insecure if a proxy or a service mesh protects it"
                )


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
