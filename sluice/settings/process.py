"""Settings that all processes have: name, logs, metrics port."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from sluice.ring.ports import Port
from sluice.settings.fields import PortNumber, PositiveSeconds, Seconds

STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Monitoring:
    """Logs, metrics and health"""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    metrics_host: str = "127.0.0.1"
    """Interface for the status page, /metrics, /livez and /readyz."""
    metrics_port: PortNumber = 0
    """Port for the status page, /metrics, /livez and /readyz; 0: none."""
    ready_stall: PositiveSeconds = 30.0
    """Seconds that the main loop may stand still, or have requests without progress, until /readyz reports it."""
    live_stall: PositiveSeconds = 120.0
    """Seconds that the main loop may stand still until /livez reports it."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(Monitoring):
    """Process"""

    role: ClassVar[str]
    module: ClassVar[str]
    """What `python -m` runs."""
    summary: ClassVar[str]
    """One sentence for the help."""

    config: str | None = None
    """YAML file of settings. Flags and environment variables take precedence."""
    id: str = ""
    """Name of this process in logs and heartbeats; default: role, host name and process id."""
    drain_timeout: Seconds = 10.0
    """Seconds for live requests to finish after SIGTERM."""

    @classmethod
    def prefix(cls) -> str:
        """Of its environment variables."""
        return f"SLUICE_{cls.role.upper()}_"

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", f"{self.role}-{socket.gethostname()}-{os.getpid()}")

    @property
    def model_name(self) -> str:
        """Of the model that it serves, or where that is; empty: it has none of its own."""
        return ""

    @property
    def ports(self) -> list[Port]:
        """TCP ports that it listens on, a ring inbox apart."""
        return [Port("metrics_port", self.metrics_host, self.metrics_port)]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
