"""Errors as HTTP clients see them: a status, and a body in OpenAI's format."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from sluice.client import (
    AdapterMissing,
    AdapterNotFound,
    AlreadyExists,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NotImplementedByServer,
    Overloaded,
    Poison,
    SluiceError,
    Unauthenticated,
)

DEFAULT_RETRY_SECONDS = 1.0

KINDS: tuple[tuple[type[SluiceError], int, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error"),
    (NotImplementedByServer, 400, "invalid_request_error"),
    (AdapterMissing, 400, "invalid_request_error"),
    (Unauthenticated, 401, "authentication_error"),
    (Forbidden, 403, "permission_error"),
    (ModelNotFound, 404, "not_found_error"),
    (AdapterNotFound, 404, "not_found_error"),
    (AlreadyExists, 409, "conflict_error"),
    (Overloaded, 429, "rate_limit_error"),
    (DeadlineExceeded, 504, "timeout_error"),
)

PARAMS = {
    "spec.text": "prompt",
    "spec.token_ids": "prompt",
    "spec.chat": "messages",
    "spec.chat.tools_json": "tools",
    "spec.chat.template_kwargs": "chat_template_kwargs",
    "spec.stopping.include_stop_in_output": "include_stop_str_in_output",
    "spec.lora_id": "model",
    "spec.kv_cache.salt": "cache_salt",
    "spec.request_id": "x-request-id",
    "token_ids": "tokens",
    "text": "prompt",
}
"""Fields of the ring's requests whose names differ in the HTTP API, with the HTTP names."""
Explain = Callable[[str], tuple[str, str]]
"""From the ring's reason for refusing a guide: the HTTP field at fault, and the reason in terms of that field."""
GUIDE = "spec.guided"
NO_PARAMS: Mapping[str, str] = MappingProxyType({})
PROMPTS = ("spec.text", "spec.token_ids.ids", "spec.chat")
MESSAGES = "spec.chat.messages"
CONTEXT_OVERFLOW, TOO_MANY = "CONTEXT_OVERFLOW", "TOO_MANY"
"""The ring's error code for a request that exceeds the context, and its reason for a prompt of too many bytes."""
COUNTS = ("context_tokens", "prompt_tokens", "output_tokens")
CONTEXT_EXCEEDED = "context_length_exceeded"
"""OpenAI's code. Clients recognise the error by it, by its name in the message, or by the first sentence."""
IN_MESSAGES = (
    (re.compile(r"\.parts\[(\d+)\]\.image(\.data)?$"), r".content[\1].image_url.url"),
    (re.compile(r"\.parts\b"), ".content"),
    (re.compile(r"(\.tool_calls\[\d+\])\.name$"), r"\1.function.name"),
    (re.compile(r"(\.tool_calls\[\d+\])\.arguments_json$"), r"\1.function.arguments"),
)
"""Fields within a message whose names differ in the HTTP API, with the HTTP names."""


class Details(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: Details


@dataclass
class ApiError(Exception):
    """Ends a request with this status, or a stream that has already begun with an event that has this body."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    """Seconds."""
    may_retry: bool = True

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(Details(self.message, self.type, self.param, self.code)))

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.may_retry else {"x-should-retry": "false"}
        if self.retry_after is not None:
            headers |= {
                "retry-after": str(math.ceil(self.retry_after)),
                "retry-after-ms": str(math.ceil(1000 * self.retry_after)),
            }
        return headers


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def api_error(
    error: SluiceError, params: Mapping[str, str] = NO_PARAMS, explain_guide: Explain | None = None
) -> ApiError:
    """`params`: HTTP names by the names of the ring's fields, in addition to PARAMS. `explain_guide`: of a guide that
    the gateway wrote itself."""
    status, kind = next(
        ((status, kind) for error_type, status, kind in KINDS if isinstance(error, error_type)), (503, "server_error")
    )
    unknown_model = "spec.model" if isinstance(error, ModelNotFound) else ""
    field = error.violations[0].field if error.violations else unknown_model
    param = _param(field, {**PARAMS, **params})
    if isinstance(error, ModelNotFound | AdapterNotFound):
        param = "model"
    retry_after = None
    if status in (429, 503) and error.retryable:
        retry_after = error.retry_after or DEFAULT_RETRY_SECONDS
    message = error.message.replace(field, param, 1) if field and param else error.message
    code = error.reason.lower() or None
    if explain_guide is not None and field.startswith(GUIDE):
        param, reason = explain_guide(error.violations[0].description)
        message = f"{param}: {reason}"
    if explained := _too_long(error, field, message):
        message, code = f"{explained} ({CONTEXT_EXCEEDED})", CONTEXT_EXCEEDED
    return ApiError(
        status,
        message,
        kind,
        param or None,
        code,
        retry_after,
        may_retry=not isinstance(error, Poison),
    )


def _too_long(error: SluiceError, field: str, message: str) -> str | None:
    """The text for a request that exceeds the context, beginning with OpenAI's words for it; None for other errors."""
    if error.reason == CONTEXT_OVERFLOW and "context_tokens" in error.metadata:
        context, prompt, output = (int(error.metadata[name]) for name in COUNTS)
        numbers = f"{prompt + output} tokens ({prompt} in the prompt, {output} in the completion)"
        return f"This model's maximum context length is {context} tokens. However, you requested {numbers}. {message}"
    if field in PROMPTS and error.metadata.get(field) == TOO_MANY:
        # The prompt was not tokenized, because its size alone exceeds the limit, which depends on the context.
        return f"{message}: it is longer than the model's context length"
    return None


def _param(field: str, params: Mapping[str, str]) -> str:
    """The HTTP API's name for a field of the ring's request."""
    if field.startswith(MESSAGES):
        field = field.removeprefix("spec.chat.")
        for pattern, name in IN_MESSAGES:
            field = pattern.sub(name, field)
        return field
    known = [name for name in params if field == name or field.startswith((f"{name}.", f"{name}["))]
    return params[max(known, key=len)] if known else field.rpartition(".")[2]
