"""The state that all endpoints share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from structlog.stdlib import BoundLogger

from gateway.byte_budget import ByteBudget
from gateway.errors import NO_PARAMS, Explain, api_error
from gateway.metrics import Counters
from sluice.client import AsyncClient, SluiceError
from sluice.settings.gateway import GatewaySettings


@dataclass(slots=True)
class Gateway:
    client: AsyncClient
    settings: GatewaySettings
    log: BoundLogger
    counters: Counters = field(default_factory=Counters)
    served_model: str = ""
    """Name of the ring's model, for requests that do not name one. Empty until a router has answered."""
    needs_token: bool = False
    """Whether the routers refuse calls without a token, so that a token identifies who makes a request."""
    ready: bool = False
    """Whether a router accepts requests."""
    budget: ByteBudget = field(init=False)
    """The memory for request bodies."""

    def __post_init__(self) -> None:
        self.budget = ByteBudget(self.settings.body_budget)


@contextmanager
def ring_errors(params: Mapping[str, str] = NO_PARAMS, explain_guide: Explain | None = None) -> Iterator[None]:
    """Turns a SluiceError of the client into an ApiError. The arguments are those of `api_error`."""
    try:
        yield
    except SluiceError as error:
        raise api_error(error, params, explain_guide) from error
