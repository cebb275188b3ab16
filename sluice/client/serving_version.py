"""The model version that new requests go to, router by router (AdminService.SetServingVersion and GetServerInfo)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.client.errors import SluiceError


@dataclass(frozen=True, slots=True)
class ServingVersion:
    """Of one router."""

    address: str
    version: str = ""
    """Label of the engines that its new requests go to; empty: any, or an error."""
    engines: int = 0
    """Those with the label that take work (all that do, if it is empty). At 0, new requests go to the others."""
    former: str | None = None
    """The version before `set_serving_version`; None: it was not called, or an error."""
    error: SluiceError | None = None
    """Why the router did not answer, or did not change anything."""


def read_info(addresses: Sequence[str], answers: Sequence[Any]) -> list[ServingVersion]:
    """Of GetServerInfo, or errors."""
    return [
        _failed(address, answer)
        if isinstance(answer, BaseException)
        else ServingVersion(address, answer.serving_version, answer.serving_engines)
        for address, answer in zip(addresses, answers, strict=True)
    ]


def read_set(addresses: Sequence[str], answers: Sequence[Any]) -> list[ServingVersion]:
    """Of SetServingVersion, or errors."""
    return [
        _failed(address, answer)
        if isinstance(answer, BaseException)
        else ServingVersion(address, answer.version, answer.serving_engines, answer.former_version)
        for address, answer in zip(addresses, answers, strict=True)
    ]


def _failed(address: str, error: BaseException) -> ServingVersion:
    """Raises what is not of the call: a fault of this program."""
    if not isinstance(error, SluiceError):
        raise error
    return ServingVersion(address, error=error)
