"""Settings of the detokenizer, read here and nowhere else."""

import os
import socket
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from sluice.ring.settings import ServiceSettings, load_settings

ENVIRONMENT = "SLUICE_DETOK_"


class DetokenizerSettings(ServiceSettings):
    """Turns tokens into text. Bind an address, tell it to the routers, and that is all."""

    model: str = Field(description="folder or hub id of the model whose tokenizer.json is used")
    name: str | None = Field(None, description="served name of the model, for logs; default: the folder's")
    revision: str | None = Field(None, min_length=1, description="branch, tag or commit of a hub model; default: main")
    listen: str = Field(
        "tcp://127.0.0.1:*", description="address of the inbox: ipc:///path or tcp://host:port (port *: any)"
    )
    advertise: str | None = Field(None, description="address by which others reach the inbox; default: the bound one")
    id: str = Field(
        default_factory=lambda: f"detok-{socket.gethostname()}-{os.getpid()}", description="name of this process"
    )
    max_streams: int = Field(200_000, ge=1, description="live sequences at most; more are refused with OVERLOADED")
    metrics_host: str = Field("127.0.0.1", description="interface on which /metrics, /livez and /readyz answer")
    metrics_port: int = Field(0, ge=0, le=65535, description="port for that; 0: none")
    ready_stall: float = Field(
        30.0, gt=0, description="seconds that its loop may stand still, or be behind, until /readyz says no"
    )
    live_stall: float = Field(120.0, gt=0, description="seconds that its loop may stand still until /livez says no")
    drain_timeout: float = Field(10.0, ge=0, description="seconds that live streams have to end after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")


def read_settings(argv: Sequence[str] | None = None) -> DetokenizerSettings:
    """From flags, environment (SLUICE_DETOK_…), YAML file, defaults. Ends the process on bad input."""
    return load_settings(DetokenizerSettings, "python -m detok_service", ENVIRONMENT, argv)
