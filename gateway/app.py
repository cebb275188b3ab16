"""The ASGI application and its routes."""

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import sluice
from gateway.api.access_log import JSON, PROBES, AccessLog, note_error
from gateway.api.adapters import load_lora_adapter, unload_lora_adapter
from gateway.api.chat import chat_complete
from gateway.api.completions import complete
from gateway.api.endpoint import Endpoint, Handler
from gateway.api.gateway import Gateway
from gateway.api.models import get_model, list_models
from gateway.api.tokens import detokenize, tokenize
from gateway.connection import BEYOND_LIMIT
from gateway.errors import ApiError
from gateway.requests.body import RETRY_SECONDS

ENDPOINTS: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model:path}", get_model),
    ("POST", "/v1/completions", complete),
    ("POST", "/v1/chat/completions", chat_complete),
    ("POST", "/v1/load_lora_adapter", load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", unload_lora_adapter),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
)

SERVED = ", ".join(f"{method} {path}" for method, path, _ in ENDPOINTS).replace(":path}", "}")
MAX_PATH_SHOWN = 200


def build_app(gateway: Gateway) -> ASGIApp:
    async def health(_: Request) -> Response:
        return Response(status_code=200 if gateway.ready else 503)

    async def version(_: Request) -> Response:
        return Response(msgspec.json.encode({"version": sluice.__version__}), media_type=JSON)

    routes = [Route(path, Endpoint(gateway, path, handle), methods=[method]) for method, path, handle in ENDPOINTS]
    origins = gateway.settings.cors_origins
    middleware = []
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.append(cors)
    app = Starlette(
        routes=[Route("/health", health), Route("/version", version), *routes],
        middleware=middleware,
        exception_handlers={HTTPException: _http_error},
    )
    return AccessLog(gateway, connections_limit(gateway, app), {path for _, path, _ in ENDPOINTS} | {*PROBES})


def connections_limit(gateway: Gateway, app: ASGIApp) -> ASGIApp:
    """Answers requests on connections beyond `max_connections`."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["state"].get(BEYOND_LIMIT):
            await app(scope, receive, send)
            return
        message = f"the gateway already has {gateway.settings.max_connections} connections, its limit"
        error = ApiError(503, message, "server_error", code="overloaded", retry_after=RETRY_SECONDS)
        note_error(scope, error)
        await Response(error.body, error.status, {**error.headers, "connection": "close"}, JSON)(scope, receive, send)

    return limited


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors raised by Starlette itself: unknown paths, and methods that a path does not support."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class only
    target = f"{request.method} {request.url.path[:MAX_PATH_SHOWN]}"
    if error.status_code in (404, 405):
        api_error = ApiError(
            error.status_code, f"{target} is not served; the gateway serves {SERVED}", code="unknown_url"
        )
    else:
        api_error = ApiError(error.status_code, error.detail)
    note_error(request.scope, api_error)
    return Response(api_error.body, error.status_code, error.headers, JSON)
