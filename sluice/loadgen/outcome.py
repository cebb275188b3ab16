"""What became of one request, by the clock of the client."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Outcome:
    """Times in seconds of the event loop's clock. Filled in by the one task that sends the request."""

    start: float
    """When it was sent."""
    queued: float = 0.0
    """How long it had waited for a free place, with a limited concurrency."""
    arrivals: list[float] = field(default_factory=list)
    """Of each chunk with new text or tokens."""
    tokens: list[int] = field(default_factory=list)
    """Of each of these chunks; 1 where the server does not say."""
    end: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    """By the server's count; 0 if it does not say."""
    completion_tokens: int | None = None
    """By the server's count; None if it does not say."""
    error: str = ""
    """Empty if it succeeded."""

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
        """0 if nothing arrived."""
        return self.arrivals[0] - self.start if self.arrivals else 0.0

    @property
    def gaps(self) -> list[float]:
        """Between chunks."""
        return [later - before for before, later in pairwise(self.arrivals)]

    @property
    def per_token(self) -> float:
        """Seconds per output token after the first; 0 for a single one."""
        return (self.latency - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
