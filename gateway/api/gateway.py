"""What all endpoints share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from structlog.stdlib import BoundLogger

from gateway.counters import Counters
from gateway.errors import api_error
from sluice.client import AsyncClient, SluiceError
from sluice.settings.gateway import GatewaySettings


@dataclass(slots=True)
class Gateway:
    client: AsyncClient
    settings: GatewaySettings
    log: BoundLogger
    counters: Counters = field(default_factory=Counters)
    served_model: str = ""
    """Name of the ring's model, where a request names none. Empty before a router has answered."""
    ready: bool = False
    """A router takes requests."""


@contextmanager
def ring_errors(guide_param: str | None = None) -> Iterator[None]:
    """Turns the client's errors into ours. `guide_param`: the field that the request's guide was made from."""
    try:
        yield
    except SluiceError as error:
        raise api_error(error, guide_param) from error
