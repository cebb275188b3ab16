"""The server under load, whatever its API."""

from typing import Protocol

from sluice.loadgen.outcome import Outcome
from sluice.loadgen.workload import Request


class TargetError(Exception):
    """The server cannot be used at all; the message names the cause."""


class Target(Protocol):
    @property
    def model(self) -> str:
        """Its name at the server."""

    async def send(self, request: Request, outcome: Outcome) -> None:
        """Write into `outcome` what arrives, as it does, and the error if it fails; the caller sets the times of start
        and end."""

    async def close(self) -> None: ...
