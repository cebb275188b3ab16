"""Calls of a named method on every rank of every engine (AdminService.CallEngines)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from sluice.v1 import admin_pb2 as pb

GRACE_SECONDS = 5.0
"""Added to the timeout of the method's call, so that the answer can name the engines that exceeded it."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What a method returned on one rank of an engine."""

    engine_id: str
    rank: int | None
    """None: `error` is an error of the whole engine."""
    value: Any = None
    """The method's return value; None with an error."""
    error: str | None = None
    """Why the call failed; names the engine, the rank and the method."""


def call_request(
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    ranks: Sequence[int] | None,
    timeout: float | None,
) -> pb.CallEnginesRequest:
    """Raises TypeError or ValueError for arguments that JSON cannot represent, ValueError for invalid ranks."""
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a list or tuple of arguments (got {args!r})")
    if ranks is not None and not ranks:
        raise ValueError("ranks is empty, must name at least one rank, or be None for all ranks")
    # Checked here, because protobuf's error for a negative number names only its type.
    if negative := [rank for rank in ranks or () if rank < 0]:
        raise ValueError(f"ranks must be at least 0 (got {negative[0]})")
    request = pb.CallEnginesRequest(
        method=method,
        args_json=json.dumps(list(args), allow_nan=False),
        kwargs_json=json.dumps(dict(kwargs or {}), allow_nan=False),
        ranks=ranks,
    )
    if timeout is not None:
        request.timeout.CopyFrom(Duration(nanos=round(timeout % 1 * 1e9), seconds=int(timeout // 1)))
    return request


def deadline(timeout: float | None) -> float | None:
    """Timeout of the gRPC call, in seconds; None: the client's default."""
    return None if timeout is None else timeout + GRACE_SECONDS


def read_answers(response: pb.CallEnginesResponse) -> list[RankAnswer]:
    return [_read(answer) for answer in response.answers]


def _read(answer: pb.RankAnswer) -> RankAnswer:
    rank = answer.rank if answer.HasField("rank") else None
    if answer.HasField("error"):
        return RankAnswer(answer.engine_id, rank, error=answer.error)
    return RankAnswer(answer.engine_id, rank, json.loads(answer.value_json))
