"""The model version to which each router sends new requests (AdminService.SetServingVersion and GetServerInfo)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.client.errors import SluiceError


@dataclass(frozen=True, slots=True)
class ServingVersion:
    """The model version to which one router sends new requests, or its error."""

    address: str
    version: str = ""
    """Label of the engines that get new requests; empty: engines with any label, or an error."""
    engines: int = 0
    """Number of such engines that accept work. If it is 0, new requests go to the other engines."""
    former: str | None = None
    """The version before this call of `set_serving_version`; None from `serving_versions`, or with an error."""
    error: SluiceError | None = None
    """Why the router's call failed."""


def read_info(addresses: Sequence[str], answers: Sequence[Any]) -> list[ServingVersion]:
    """Read answers of GetServerInfo, or errors."""
    return [
        _failed(address, answer)
        if isinstance(answer, BaseException)
        else ServingVersion(address, answer.serving_version, answer.serving_engines)
        for address, answer in zip(addresses, answers, strict=True)
    ]


def read_set(addresses: Sequence[str], answers: Sequence[Any]) -> list[ServingVersion]:
    """Read answers of SetServingVersion, or errors."""
    return [
        _failed(address, answer)
        if isinstance(answer, BaseException)
        else ServingVersion(address, answer.version, answer.serving_engines, answer.former_version)
        for address, answer in zip(addresses, answers, strict=True)
    ]


def _failed(address: str, error: BaseException) -> ServingVersion:
    """Raises an exception that is not an error of the call, but a defect of this program."""
    if not isinstance(error, SluiceError):
        raise error
    return ServingVersion(address, error=error)
