"""The path of every request: admission, reading the body, the handler, one log line."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.connected import while_connected
from gateway.api.gateway import Gateway
from gateway.caller import Caller, caller_of
from gateway.errors import ApiError
from gateway.requests.body import read_body

JSON = "application/json"
CLIENT_GONE = 499
"""nginx's status for a client that disconnected. It is only counted and logged."""
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Exchange:
    """One request and its response. A handler either returns a complete body or sends the response itself."""

    caller: Caller
    body: bytes
    path_params: dict[str, str]
    send: Send
    notes: dict[str, object]
    """Fields of the request's log line."""


Handler = Callable[[Gateway, Exchange], Awaitable[bytes | None]]


class Endpoint:
    def __init__(self, gateway: Gateway, path: str, handle: Handler) -> None:
        self._gateway = gateway
        self._path = path
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counters, began = self._gateway.counters, time.monotonic()
        answer = AnswerStart(send)
        notes: dict[str, object] = {}
        counters.open += 1
        try:
            await self._answer(scope, receive, answer, notes)
            status = answer.status
        except ClientDisconnect:
            status = CLIENT_GONE
        except ApiError as error:
            status = error.status
            notes["error"] = error.code or error.type
            await Response(error.body, status, error.headers, JSON)(scope, receive, answer.send)
        except Exception as error:
            status = 500
            self._gateway.log.exception("request_failed", path=self._path, exc_info=error)
            await self._fail(scope, receive, answer)
        finally:
            counters.open -= 1
        seconds = time.monotonic() - began
        counters.requests[self._path, str(status)] += 1
        counters.request_seconds.observe(seconds)
        self._gateway.log.info("request_ended", path=self._path, status=status, seconds=round(seconds, 4), **notes)

    async def _answer(self, scope: Scope, receive: Receive, answer: "AnswerStart", notes: dict[str, object]) -> None:
        caller = caller_of(Headers(scope=scope))
        answer.request_id = notes["request_id"] = caller.request_id
        if self._gateway.counters.open > self._gateway.settings.max_requests:
            self._gateway.counters.refused += 1
            message = f"the gateway already serves {self._gateway.settings.max_requests} requests, its limit"
            raise ApiError(429, message, "rate_limit_error", code="overloaded", retry_after=RETRY_SECONDS)
        request = Request(scope, receive)
        body = b""
        if request.method == "POST":
            body = await read_body(request, self._gateway.settings.max_body_bytes)
        exchange = Exchange(caller, body, request.path_params, answer.send, notes)
        response = await while_connected(receive, self._run(exchange))
        if response is not None:
            await Response(response, media_type=JSON)(scope, receive, answer.send)

    async def _run(self, exchange: Exchange) -> bytes | None:
        return await self._handle(self._gateway, exchange)

    async def _fail(self, scope: Scope, receive: Receive, answer: "AnswerStart") -> None:
        if answer.status:
            raise RuntimeError("the response was cut short by an internal error; see the log")
        error = ApiError(500, "an internal error; the gateway's log describes it", "server_error")
        await Response(error.body, error.status, media_type=JSON)(scope, receive, answer.send)


class AnswerStart:
    """Forwards ASGI messages, adds the request's id to the headers, and records the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.request_id = ""
        self.status = 0

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            request_id = [(b"x-request-id", self.request_id.encode())] if self.request_id else []
            message = {**message, "headers": [*message["headers"], *request_id]}
        return self._send(message)
