"""Copies of blocks from elsewhere, as they arrive."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine_worker.step import Content

MACHINE: Final = "machine"
KEEPER: Final = "keeper"
"""Sources, as metrics name them: another engine's file on this machine, or a keeper."""


class Target(NamedTuple):
    """A held block that receives a copy."""

    block: int
    content: Content


@dataclass(eq=False, slots=True)
class Copies:
    """Blocks that are being copied from one source."""

    targets: list[Target]
    totals: "Future[list[int | None]]"
    """The sum of each copy; None: it failed."""
    started_at: float
    """When the request began to wait for them."""
    source: str
    dropped: bool = False
    """Whether the cache was flushed meanwhile: the copies do not count."""
    published: bool = False
    """Whether the copies have ended, and the blocks are findable."""
