"""The path of every request to a handler: its caller, its body, admission, the handler, and clients that disconnect."""

import asyncio
import hashlib
import re
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.access_log import CLIENT_GONE, JSON, SentStatus, note_error, notes_of
from gateway.api.gateway import Gateway, ring_errors
from gateway.byte_budget import OverBudget, Share
from gateway.errors import ApiError, invalid
from gateway.requests.body import RETRY_SECONDS, read_body
from sluice.client import Metadata

CHECK_SECONDS = 5.0
"""Timeout for asking the routers whether they accept a token."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,120}", re.ASCII)
"""Shorter than the ring's limit, because the id of each prompt of a list gets a number appended."""
FORWARDED = ("authorization", "traceparent", "tracestate", "x-sluice-tenant")
TOKEN_DIGITS = 16
VALUE = re.compile(r"[\x20-\x7e]{0,8192}", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    request_id: str
    metadata: Metadata
    token: str
    """The beginning of the SHA-256 of `Authorization`, for logs and limits. Empty without the header."""


@dataclass(slots=True)
class Exchange:
    """One request and its response. A handler either returns a complete body or sends the response itself."""

    caller: Caller
    body: bytes
    path_params: dict[str, str]
    send: Send
    notes: dict[str, object]
    """Fields of the request's log line."""


Handler = Callable[[Gateway, Exchange], Coroutine[Any, Any, bytes | None]]


class Endpoint:
    def __init__(self, gateway: Gateway, path: str, handle: Handler) -> None:
        self._gateway = gateway
        self._path = path
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes_of(scope)["route"] = self._path
        answer = SentStatus(send)
        try:
            with self._gateway.budget.share(_address(scope)) as share:
                await self._answer(scope, receive, answer, share)
        except ClientDisconnect:
            notes_of(scope)["status"] = CLIENT_GONE
        except ApiError as error:
            note_error(scope, error)
            # A stream that has begun has sent the error itself.
            if not answer.status:
                await Response(error.body, error.status, error.headers, JSON)(scope, receive, answer.send)
        except asyncio.CancelledError:
            # Only the end of the drain timeout cancels requests.
            ending = _shutting_down()
            note_error(scope, ending)
            if answer.status:
                raise  # The connection is closed, so that the client sees that the response is incomplete.
            await Response(ending.body, ending.status, ending.headers, JSON)(scope, receive, answer.send)
        except Exception as error:
            notes_of(scope)["reason"] = "internal_error"
            self._gateway.log.exception("request_failed", path=self._path, exc_info=error)
            await self._fail(scope, receive, answer)

    async def _answer(self, scope: Scope, receive: Receive, answer: SentStatus, share: Share) -> None:
        notes = notes_of(scope)
        caller = _caller_of(Headers(scope=scope))
        notes["request_id"] = caller.request_id
        answer.headers = [(b"x-request-id", caller.request_id.encode())]
        if caller.token:
            notes["token"] = caller.token
        request = Request(scope, receive)
        body = b""
        if request.method == "POST":
            body = await self._read_body(request, caller, share)
        with self._admitted():
            exchange = Exchange(caller, body, request.path_params, answer.send, notes)
            response = await _while_connected(receive, self._handle(self._gateway, exchange))
            if response is not None:
                await Response(response, media_type=JSON)(scope, receive, answer.send)

    async def _read_body(self, request: Request, caller: Caller, share: Share) -> bytes:
        token = caller.token if self._gateway.needs_token else ""

        async def check_token() -> None:
            if self._gateway.needs_token:
                await self._check_token(caller)
                share.move(token or share.peer)

        try:
            body = await read_body(request, self._gateway.settings.max_body_bytes, share, check_token)
            # The router is about to check the token of a short body, too.
            share.move(token or share.peer)
        except OverBudget as error:
            raise _overloaded(str(error)) from None
        return body

    async def _check_token(self, caller: Caller) -> None:
        """Raises ApiError if the routers do not accept it."""
        try:
            with ring_errors():
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._gateway.client.models(metadata=caller.metadata)
        except TimeoutError:
            raise ApiError(503, "no router has checked the token", "server_error", retry_after=RETRY_SECONDS) from None

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Raises ApiError if `max_requests` are in progress."""
        counters, limit = self._gateway.counters, self._gateway.settings.max_requests
        if counters.open >= limit:
            counters.refused += 1
            raise _overloaded(f"the gateway already serves {limit} requests, its limit")
        counters.open += 1
        try:
            yield
        finally:
            counters.open -= 1

    async def _fail(self, scope: Scope, receive: Receive, answer: SentStatus) -> None:
        if answer.status:
            raise RuntimeError("the response was cut short by an internal error; see the log")
        error = ApiError(500, "an internal error; the gateway's log describes it", "server_error")
        await Response(error.body, error.status, media_type=JSON)(scope, receive, answer.send)


def _caller_of(headers: Headers) -> Caller:
    """Raises ApiError."""
    request_id = headers.get("x-request-id") or uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(request_id):
        raise invalid("must be 1 to 120 characters of [A-Za-z0-9._:-]", "x-request-id")
    metadata = tuple((name, headers[name]) for name in FORWARDED if name in headers)
    for name, value in metadata:
        if not VALUE.fullmatch(value):
            raise invalid("must be printable ASCII, at most 8192 characters", name)
    authorization = headers.get("authorization", "")
    token = hashlib.sha256(authorization.encode()).hexdigest()[:TOKEN_DIGITS] if authorization else ""
    return Caller(request_id, metadata, token)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. If the client closes its connection first, cancel `work` and raise ClientDisconnect."""
    running, disconnected = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((running, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        running.cancel()
        disconnected.cancel()
        await asyncio.gather(running, disconnected, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _overloaded(message: str) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="overloaded", retry_after=RETRY_SECONDS)


def _shutting_down() -> ApiError:
    message = "the gateway is shutting down, and the request did not end in time"
    return ApiError(503, message, "server_error", code="shutting_down", retry_after=RETRY_SECONDS)


def _address(scope: Scope) -> str:
    """The client's address, which is charged for the bytes that it sends."""
    return str(scope["client"][0]) if scope.get("client") else ""
