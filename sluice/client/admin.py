"""What AdminService offers: calls of a method on every rank of every engine, the model version in service, and endless
streams of statistics and KV cache events."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Self, TypeVar

import grpc

from sluice.client.connection import Method, Routers
from sluice.client.errors import SluiceError, is_task_cancelled, with_timeout
from sluice.client.streams import AsyncOpenCall, OpenCall
from sluice.v1 import admin_pb2 as pb

GRACE_SECONDS = 5.0
"""Added to the timeout of the method's call, so that the answer can name the engines that exceeded it."""

R = TypeVar("R")


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
        request.timeout.FromTimedelta(timedelta(seconds=timeout))
    return request


def deadline(timeout: float | None) -> float | None:
    """Timeout of the gRPC call, in seconds; None: the client's default."""
    return None if timeout is None else timeout + GRACE_SECONDS


def read_answers(response: pb.CallEnginesResponse) -> list[RankAnswer]:
    return [_read_answer(answer) for answer in response.answers]


def _read_answer(answer: pb.RankAnswer) -> RankAnswer:
    rank = answer.rank if answer.HasField("rank") else None
    if answer.HasField("error"):
        return RankAnswer(answer.engine_id, rank, error=answer.error)
    return RankAnswer(answer.engine_id, rank, json.loads(answer.value_json))


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
        _failed(address, answer) or ServingVersion(address, answer.serving_version, answer.serving_engines)
        for address, answer in zip(addresses, answers, strict=True)
    ]


def read_set(addresses: Sequence[str], answers: Sequence[Any]) -> list[ServingVersion]:
    """Read answers of SetServingVersion, or errors."""
    return [
        _failed(address, answer)
        or ServingVersion(address, answer.version, answer.serving_engines, answer.former_version)
        for address, answer in zip(addresses, answers, strict=True)
    ]


def _failed(address: str, answer: Any) -> ServingVersion | None:
    """The result of a call that failed; None if it succeeded. Raises any other exception, since it is a defect."""
    if isinstance(answer, BaseException) and not isinstance(answer, SluiceError):
        raise answer
    return ServingVersion(address, error=answer) if isinstance(answer, SluiceError) else None


class Feed(OpenCall, Generic[R]):
    """Iterator over the responses of one router.

    Raises SluiceError when the stream ends; a new feed then uses the next router.
    """

    def __init__(self, routers: Routers, method: Method, request: Any, timeout: float | None) -> None:
        """Wait until the server has started the stream, or refused it, in which case the first `next` raises."""
        self._routers, self._router, self._timeout = routers, routers.current, timeout
        super().__init__(routers.start(self._router, method, request, timeout))
        self._call.initial_metadata()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        try:
            response: R = next(self._call)
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise StopIteration from None
            self._routers.skip(self._router)
            raise with_timeout(self._router.error(error), self._timeout) from None
        return response


class AsyncFeed(AsyncOpenCall, Generic[R]):
    """Asynchronous iterator over the responses of one router.

    Raises SluiceError when the stream ends; a new feed then uses the next router.
    """

    def __init__(self, routers: Routers, method: Method, request: Any, timeout: float | None) -> None:
        self._routers, self._router, self._timeout = routers, routers.current, timeout
        super().__init__(routers.start(self._router, method, request, timeout))

    async def started(self) -> None:
        """Wait until the server has started the stream, or refused it, in which case the iteration raises."""
        await self._call.initial_metadata()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        try:
            response: R = await anext(self._incoming)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if is_task_cancelled():
                raise
            if self._closed.is_set():
                raise StopAsyncIteration from None
            self._routers.skip(self._router)
            raise with_timeout(self._router.error(error), self._timeout) from None
        return response


class Steps(Feed[pb.StreamStepsResponse]):
    """Endless iterator over `StreamStepsResponse`: every engine step from now on. Waits while all engines are idle."""


class AsyncSteps(AsyncFeed[pb.StreamStepsResponse]):
    """Endless asynchronous iterator over `StreamStepsResponse`: every engine step from `started` on."""


class CacheEvents(Feed[pb.StreamCacheEventsResponse]):
    """Endless iterator over `StreamCacheEventsResponse`: the KV cache events in the engines' buffers, then new ones."""


class AsyncCacheEvents(AsyncFeed[pb.StreamCacheEventsResponse]):
    """Endless asynchronous iterator over `StreamCacheEventsResponse`, like `CacheEvents`."""
