"""What is known of one submission of a request to an engine."""

import time
from dataclasses import dataclass, field

from router.peers.peers import DetokenizerPeer, EnginePeer
from router.peers.placement import Choice


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request to an engine."""

    number: int
    engine: EnginePeer
    detokenizer: DetokenizerPeer
    choice: Choice
    """What placement charges for it."""
    tokens_before: int
    """Tokens received by the attempts before this one."""
    progress_before: int
    """`RequestLog.progress` by the attempts before this one."""
    submitted: float = field(default_factory=lambda: time.monotonic())
    """On time.monotonic's clock, as all times here."""
    started: bool = False
    has_tokens: bool = False
    """Its first token has come, so the prompt is computed."""


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """One that was given up."""

    number: int
    engine: str
    detokenizer: str
    submitted: float
    ended: float
    reason: str
    """An error code."""
    received_tokens: int
    """By this attempt and those before it."""
