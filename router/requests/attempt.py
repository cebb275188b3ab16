"""Attempts: submissions of a request to an engine."""

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
    """The load that placement charges for the attempt."""
    tokens_before: int
    """Tokens received from earlier attempts."""
    progress_before: int
    """`RequestLog.progress` reached by earlier attempts."""
    submitted: float = field(default_factory=lambda: time.monotonic())
    """By time.monotonic, like all times here."""
    started: bool = False
    has_tokens: bool = False
    """Whether its first token has arrived, so the prompt has been computed."""


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that was given up."""

    number: int
    engine: str
    detokenizer: str
    submitted: float
    ended: float
    reason: str
    """An error code."""
    received_tokens: int
    """Tokens received from this attempt and earlier ones."""
