"""The interface of a server under load, independent of its API."""

from typing import Protocol

from sluice.loadgen.outcome import Outcome
from sluice.loadgen.workload import Request


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
