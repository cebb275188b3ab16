"""One log line and one count for each request, whether a handler answers it or not."""

import time
from collections.abc import Awaitable, Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.gateway import Gateway
from gateway.errors import ApiError

JSON = "application/json"
CLIENT_GONE = 499
"""nginx's status for a client that disconnected. It is only counted and logged."""
MAX_TENANT = 64
OTHER = "other"
"""Stands for paths that are not served, which may contain secrets."""
PROBES = ("/health", "/version")
"""Their lines have the level debug, and their times are not in the histogram."""


class AccessLog:
    """The outermost ASGI application. Inner ones add fields to the line with `notes_of`."""

    def __init__(self, gateway: Gateway, app: ASGIApp, paths: Collection[str]) -> None:
        """`paths`: those that are served."""
        self._gateway = gateway
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, sent = time.monotonic(), SentStatus(send)
        notes = notes_of(scope)
        try:
            await self._app(scope, receive, sent.send)
        finally:
            self._end(scope, notes.pop("status", sent.status or CLIENT_GONE), time.monotonic() - began, notes)

    def _end(self, scope: Scope, status: int, seconds: float, notes: dict[str, Any]) -> None:
        path = notes.pop("route", scope["path"] if scope["path"] in self._paths else OTHER)
        counters = self._gateway.counters
        counters.requests[path, str(status)] += 1
        if path not in PROBES:
            counters.request_seconds.observe(seconds)
        tenant = Headers(scope=scope).get("x-sluice-tenant", "")[:MAX_TENANT]
        if tenant:
            notes["tenant"] = tenant
        log = getattr(self._gateway.log, level_of(path, status, failed="reason" in notes))
        log("request_ended", method=scope["method"], path=path, status=status, **notes, seconds=round(seconds, 4))


class SentStatus:
    """Forwards ASGI messages, adds headers to the response, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *self.headers]}
        return self._send(message)


def notes_of(scope: Scope) -> dict[str, Any]:
    """The fields of the request's log line. `route` is the path with placeholders, `status` overrides that of the
    response, such as CLIENT_GONE."""
    notes: dict[str, Any] = scope.setdefault("state", {}).setdefault("notes", {})
    return notes


def note_error(scope: Scope, error: ApiError) -> None:
    notes_of(scope)["reason"] = error.code or error.type


def level_of(path: str, status: int, failed: bool) -> str:
    """`failed`: there is an error, perhaps after a stream has begun with status 200."""
    if path in PROBES:
        return "debug"
    if status >= 500:
        return "error"
    return "warning" if (failed or status >= 400) and status != CLIENT_GONE else "info"


def log_invalid(gateway: Gateway) -> None:
    """The line of a request that is not valid HTTP, so that its method and path are unknown."""
    gateway.counters.requests[OTHER, "400"] += 1
    gateway.log.warning("request_ended", status=400, reason="invalid_http")
