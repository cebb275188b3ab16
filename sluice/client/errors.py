"""The clients' exceptions, created from a gRPC status and its google.rpc details."""
# ruff: noqa: N818

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from sluice.client.results import seconds

DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Violation:
    """One invalid field of the request."""

    field: str
    """Path of the field in the request message, such as "spec.sampling.top_p"."""
    description: str
    """What is wrong with its value."""


class SluiceError(Exception):
    """Base of the exceptions of a failed call."""

    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after: float | None = None,
        engine_deaths: int = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        """The server's error code, such as "CONTEXT_OVERFLOW"; empty if the server sent no code."""
        self.violations = violations
        """The invalid fields of an InvalidRequest."""
        self.retry_after = retry_after
        """Seconds after which the server suggests retrying; None: no suggestion."""
        self.engine_deaths = engine_deaths
        """Consecutive engine deaths that the server attributes to this request."""
        self.metadata = dict(metadata or {})
        """Facts by name, such as `context_tokens` of a CONTEXT_OVERFLOW; for invalid fields, the reason of each."""


class InvalidRequest(SluiceError):
    """A field's value is out of range or not supported. `violations` name each field."""


class ModelNotFound(SluiceError):
    """The server does not serve this model."""


class ModelChanged(SluiceError):
    """A stream broke, and no engine serves its model any more. Send the request again from the start."""


class AdapterNotFound(SluiceError):
    """No LoRA adapter is loaded under this id."""


class AdapterMissing(SluiceError):
    """No router or engine has the uploaded files of a LoRA adapter any more. Upload them again."""


class AlreadyExists(SluiceError):
    """A running request has this request_id."""


class Overloaded(SluiceError):
    """The server's queue is full. Retry after `retry_after` seconds."""

    retryable = True


class Unavailable(SluiceError):
    """The server is unreachable or draining, or lost the engine or detokenizer of this request."""

    retryable = True


class ConnectionLost(Unavailable):
    """An established connection broke, so a router may have begun the call."""


class Unreachable(Unavailable):
    """No router was reached: the address is wrong, nothing listens there, or the handshake failed."""

    @property
    def cause(self) -> str:
        """The reason in a few words, taken from the end of gRPC's message."""
        # Failed TLS handshakes have the status of a later check at the end.
        return self.message.removesuffix(": OK").rsplit(": ", 1)[-1]


class WrongServer(Unreachable):
    """A server answers at the address, but not a router, or TLS fails. The message says what to check."""

    @property
    def cause(self) -> str:
        return self.message


class NotImplementedByServer(SluiceError):
    """The server does not implement the option or the call."""


class DeadlineExceeded(SluiceError):
    """The call's timeout expired."""


class Cancelled(SluiceError):
    """The call was cancelled, by the client or the server."""


class Unauthenticated(SluiceError):
    """The token or certificate is missing or unknown."""


class Forbidden(SluiceError):
    """The caller is not allowed to do this."""


class ServerError(SluiceError):
    """The server failed or violated the protocol."""


class Poison(ServerError):
    """Several engines in a row died while they ran this request, so it is not retried. See `engine_deaths`."""


class LostEvents(ServerError):
    """A stream lost events and could not be resumed."""


_BY_STATUS: dict[grpc.StatusCode, type[SluiceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: NotImplementedByServer,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
}

_BY_REASON: dict[str, type[SluiceError]] = {
    "ADAPTER_MISSING": AdapterMissing,
    "ADAPTER_NOT_FOUND": AdapterNotFound,
    "DRAINING": Unavailable,
    "MODEL_CHANGED": ModelChanged,
    "POISON": Poison,
}

# Parts of gRPC's messages for connections that broke, which it also reports with statuses other than UNAVAILABLE. Other
# messages without a reason, such as "no healthy upstream", are those of proxies.
CONNECTION_LOST = {
    grpc.StatusCode.UNAVAILABLE: (
        "socket closed",
        "connection reset",
        "connection aborted",
        "connection timed out",
        "broken pipe",
        "goaway",
        "rst_stream",
        "stream removed",
        "ping timeout",
        "keepalive",
        "endpoint closing",
        "transport closed",
        "recvmsg",
        "sendmsg",
    ),
    grpc.StatusCode.UNKNOWN: ("stream removed",),
    grpc.StatusCode.INTERNAL: ("rst_stream", "http2", "http/2", "connection", "goaway"),
}
HTTP_STATUS = "received http2 header with status"
"""Part of gRPC's message for the answer of a proxy that reached no router."""

NOT_HTTP_2 = ("http1.x server", "failed parsing http/2")
CLOSED = ("socket closed", "connection reset", "broken pipe")
# How gRPC's messages for calls without a connection begin.
NOT_CONNECTED = (
    "failed to connect to ",
    "connections to all backends failing",
    "errors resolving ",
    "dns resolution failed",
    "empty address list",
)


def is_task_cancelled() -> bool:
    """Whether an asyncio.CancelledError means that this task was cancelled, not only its gRPC call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def from_rpc_error(error: Any) -> SluiceError:
    """The exception for a grpc.RpcError, which must also have code(), details() and trailing_metadata()."""
    # grpc.aio raises CancelledError for a call that this side cancelled.
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("the call was cancelled by closing its client")
    status = _status(error)
    reason, violations, retry_after = "", [], None
    metadata: dict[str, str] = {}
    for detail in status.details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest.FromString(detail.value)
            violations += [Violation(each.field, each.description) for each in bad_request.field_violations]
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry_after = seconds(error_details_pb2.RetryInfo.FromString(detail.value).retry_delay)
    deaths = metadata.get("engine_deaths", "")
    message = error.details() or error.code().name
    kind = _BY_REASON.get(reason) if reason else _connection_error(error.code(), message.lower())
    kind = kind or _BY_STATUS.get(error.code(), ServerError)
    return kind(
        message,
        reason=reason,
        violations=tuple(violations),
        retry_after=retry_after,
        engine_deaths=int(deaths) if deaths.isdecimal() else 0,
        metadata=metadata,
    )


def with_timeout(error: SluiceError, timeout: float | None) -> SluiceError:
    """gRPC's error about an expired timeout, with its seconds; other errors as they are."""
    if timeout is None or error.reason or not isinstance(error, DeadlineExceeded):
        return error
    return DeadlineExceeded(f"the call did not end within its timeout of {timeout:g} s")


def explain(error: Unreachable, address: str, uses_tls: bool) -> str | None:
    """The probable cause of this error of a connection; None if it is unknown.

    Recognizes a server of another kind, or one with other TLS settings, by gRPC's message.
    """
    text = error.message.lower()
    if any(mark in text for mark in NOT_HTTP_2):
        return (
            f"{address} does not speak HTTP/2, so it may be the port of a gateway or of metrics: use the router's "
            "port, 50051 unless set by --port"
        )
    if HTTP_STATUS in text:
        return f"a proxy answers at {address}, but reaches no router ({error.message})"
    is_closed = any(mark in text for mark in CLOSED)
    if uses_tls:
        return _explain_tls(text, error.cause, address, is_closed)
    if is_closed:
        return (
            f"{address} closes connections without TLS, so it may require TLS: --tls-ca FILE, in Python "
            "tls=TlsOptions(ca=FILE); or it is a proxy without a router behind it"
        )
    return None


def _connection_error(code: grpc.StatusCode, message: str) -> type[SluiceError] | None:
    """The kind of an error of the connection itself; None for an answer of a server."""
    marks = CONNECTION_LOST.get(code)
    if marks is None:
        return None
    if HTTP_STATUS in message or message.startswith(NOT_CONNECTED):
        return Unreachable
    return ConnectionLost if any(mark in message for mark in marks) else None


def _status(error: Any) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                # Sent by a proxy, or damaged; the status and the message are still useful.
                break
    return status_pb2.Status()


def _explain_tls(text: str, cause: str, address: str, is_closed: bool) -> str | None:
    if "wrong_version_number" in text:
        return f"{address} does not answer with TLS: if it is a router without TLS, omit --tls-ca, in Python tls"
    if "certificate_verify_failed" in text:
        return f"the certificate of {address} is not valid, or not signed by an authority in --tls-ca ({cause})"
    if is_closed:
        return (
            f"{address} closes connections during TLS, so it may require a client certificate: --tls-cert and "
            "--tls-key, in Python TlsOptions(certificate=..., key=...)"
        )
    return None
