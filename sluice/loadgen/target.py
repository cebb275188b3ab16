"""A server under load, whatever its API, and the outcome of one request as measured by the client."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from sluice.loadgen.workload import Request


@dataclass(slots=True)
class Outcome:
    """Times are seconds of the event loop's clock. Written only by the task that sends the request."""

    start: float
    """When the request was sent."""
    queued: float = 0.0
    """How long the request had waited before, because of the limit on concurrency."""
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each chunk with new text or tokens."""
    tokens: list[int] = field(default_factory=list)
    """Number of tokens in each of these chunks; 1 if the server does not report it."""
    end: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    """The server's count; 0 if it reports none."""
    completion_tokens: int | None = None
    """The server's count; None if it reports none."""
    error: str = ""
    """Empty if the request succeeded."""

    def on_chunk(self, now: float, text: str, tokens: int = 1) -> None:
        self.arrivals.append(now)
        self.tokens.append(tokens)
        self.text += text

    @property
    def succeeded(self) -> bool:
        return not self.error

    @property
    def output_tokens(self) -> int:
        return sum(self.tokens) if self.completion_tokens is None else self.completion_tokens

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def first_token(self) -> float:
        """Seconds to the first chunk; 0 if none arrived."""
        return self.arrivals[0] - self.start if self.arrivals else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def per_token(self) -> float:
        """Seconds per output token after the first; 0 for a single token."""
        return (self.latency - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of all requests, the same for every server."""

    model: str = ""
    """Empty: the first model that the server lists."""
    chat: bool = False
    """Whether to send each prompt as a user message."""
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout: float | None = None
    """Seconds per request."""


class TargetError(Exception):
    """The server cannot be used; the message names the cause."""


class Target(Protocol):
    @property
    def model(self) -> str:
        """The model's name at the server."""

    async def send(self, request: Request, outcome: Outcome) -> None:
        """Send a request, and record each chunk in `outcome` as it arrives, or the error. The caller sets the start and
        end times."""

    async def close(self) -> None: ...
