"""Errors that clients see: gRPC statuses with google.rpc details, and the collection of invalid fields."""

import asyncio
import random
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, NoReturn, TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import StatusCode, aio

from sluice.wire.errors import ErrorCode
from sluice.wire.params import Range

Call: TypeAlias = aio.ServicerContext[Any, Any]

DOMAIN = "sluice"
MAX_VIOLATION_BYTES = 3000
"""Limit for all violations in one status: gRPC clients accept 8 KiB of metadata, and the details are sent as base64."""
MAX_REASON_BYTES = 1000
"""Limit for the field names and reasons in ErrorInfo."""
MAX_MESSAGE_CHARACTERS = 400

PUSHBACK = "grpc-retry-pushback-ms"
PREVIOUS_ATTEMPTS = "grpc-previous-rpc-attempts"
ATTEMPTS = re.compile("[0-9]{1,9}", re.ASCII)
MAX_PREVIOUS_ATTEMPTS = 4
"""gRPC makes at most five attempts."""
RETRIED_STATUSES = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE"})
"""Statuses that clients' retry policies usually list."""

DISCONNECT_SECONDS = 1.0
"""gRPC reports a client's disconnect at most this long after a send to it failed."""


class Reason(Enum):
    """Why a field is invalid, in machine-readable form: `ErrorInfo.metadata` and `BadRequest` contain the name."""

    INVALID = "any other reason"
    MISSING = "the field is required, but unset or empty"
    OUT_OF_RANGE = "the number is too small or too large, or the id does not exist"
    TOO_MANY = "too many elements, characters or bytes"
    UNKNOWN_VALUE = "not one of the known names"
    INVALID_FORMAT = "text or bytes that cannot be parsed"
    DUPLICATE = "the value occurs more than once"
    CONFLICT = "the field cannot be combined with another field"
    NOT_SUPPORTED = "this model or this server does not support it"


class Violation(NamedTuple):
    field: str
    """Path from the request message, such as "spec.sampling.temperature"."""
    description: str
    private: bool = False
    """The description quotes the caller's text and must not be logged."""
    reason: Reason = Reason.INVALID


class RequestError(Exception):
    """Ends one call with the gRPC status of its code."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        violations: Iterable[Violation] = (),
        metadata: Mapping[str, str] | None = None,
        private: bool = False,
    ) -> None:
        """`private`: the message quotes the caller's text and must not be logged."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})
        self.private = private or any(violation.private for violation in self.violations)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.violations, self.metadata, self.private)

    @classmethod
    def invalid(
        cls,
        violations: Sequence[Violation],
        code: ErrorCode = ErrorCode.INVALID_ARGUMENT,
        metadata: Mapping[str, str] | None = None,
    ) -> "RequestError":
        """An error whose message describes the first violation and counts the others."""
        first = violations[0]
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        return cls(code, f"{first.field}: {first.description}{more}", violations, metadata)

    @classmethod
    def at(
        cls, field: str, description: str, *, private: bool = False, reason: Reason = Reason.INVALID
    ) -> "RequestError":
        """INVALID_ARGUMENT for a single field."""
        return cls.invalid([Violation(field, description, private, reason)])

    @classmethod
    def internal(cls, error_id: str) -> "RequestError":
        """The error for an unexpected exception that was logged with this id."""
        message = f"internal error; see error id {error_id} in the server's log"
        return cls(ErrorCode.INTERNAL, message, metadata={"error_id": error_id})

    @property
    def loggable(self) -> str:
        """The message, or a placeholder if it is private."""
        return "not logged: it quotes the request" if self.private else self.message

    def status(self) -> status_pb2.Status:
        """A google.rpc.Status with ErrorInfo, plus BadRequest and RetryInfo where they apply."""
        status = status_pb2.Status(
            code=code_pb2.Code.Value(self.code.status), message=self.message[:MAX_MESSAGE_CHARACTERS]
        )
        details: list[Message] = [
            error_details_pb2.ErrorInfo(
                reason=self.code.name, domain=DOMAIN, metadata=_reasons(self.violations) | self.metadata
            )
        ]
        if self.violations:
            details.append(_bad_request(self.violations))
        if self.code.retry_after is not None:
            details.append(error_details_pb2.RetryInfo(retry_delay=duration(self.code.retry_after)))
        for detail in details:
            status.details.add().Pack(detail)
        return status


def duration(seconds: float) -> Duration:
    """Negative values become 0."""
    nanos = round(max(seconds, 0.0) * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


async def sent(operation: Awaitable[None]) -> None:
    """Await an operation on a call. If it fails because the client disconnected, the call is cancelled instead of
    failing with aio.InternalError."""
    try:
        await operation
    except aio.InternalError:
        # A send to a disconnected client fails shortly before gRPC cancels the call. The cancellation ends this sleep.
        await asyncio.sleep(DISCONNECT_SECONDS)
        raise


async def abort(call: Call, error: RequestError) -> NoReturn:
    """End the call with an error. If nothing was written yet, no initial metadata is sent either, so that clients'
    retry policies apply."""
    status = error.status()
    trailers = [("grpc-status-details-bin", status.SerializeToString()), *_pushback(call, error.code)]
    await sent(call.abort(StatusCode[error.code.status], status.message, tuple(trailers)))
    raise AssertionError("abort does not return")


def _pushback(call: Call, code: ErrorCode) -> list[tuple[str, str]]:
    """The trailer that sets the delay of retries by the client's gRPC library (gRFC A6)."""
    if code.retry_after is None:
        # A negative pushback stops retries, but also counts towards the channel's retry throttling. So it is not sent
        # for statuses that no policy retries.
        return [(PUSHBACK, "-1")] if code.status in RETRIED_STATUSES else []
    # The pushback replaces the client's backoff, so it must be exponential and random.
    delay = code.retry_after * 2 ** _previous_attempts(call) * random.uniform(1.0, 2.0)
    return [(PUSHBACK, str(round(1000 * delay)))]


def _previous_attempts(call: Call) -> int:
    text = next((str(value) for key, value in call.invocation_metadata() or () if key == PREVIOUS_ATTEMPTS), "")
    return min(int(text), MAX_PREVIOUS_ATTEMPTS) if ATTEMPTS.fullmatch(text) else 0


def _reasons(violations: Sequence[Violation]) -> dict[str, str]:
    """Names of reasons by field, for as many violations as fit."""
    reasons: dict[str, str] = {}
    size = 0
    for violation in violations:
        size += len(violation.field) + len(violation.reason.name)
        if size > MAX_REASON_BYTES:
            break
        reasons.setdefault(violation.field, violation.reason.name)
    return reasons


def _bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    bad_request = error_details_pb2.BadRequest()
    for i, violation in enumerate(violations):
        if bad_request.ByteSize() > MAX_VIOLATION_BYTES:
            bad_request.field_violations.add(field="", description=f"and {len(violations) - i} more")
            break
        bad_request.field_violations.add(
            field=violation.field, description=violation.description, reason=violation.reason.name
        )
    return bad_request


SHOWN_CHARACTERS = 64
LOGGED_CHARACTERS = 128


class Violations:
    """Collects the violations of one call, so that its error can report all of them."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, field: str, description: str, private: bool = False, reason: Reason = Reason.INVALID) -> None:
        self.found.append(Violation(field, description, private, reason))

    def within(self, field: str, value: float, allowed: Range) -> None:
        if problem := allowed.problem(value):
            self.add(field, problem, reason=Reason.OUT_OF_RANGE)

    def at_most(self, field: str, count: int, limit: int, unit: str) -> bool:
        """Whether the count is within the limit."""
        if count > limit:
            self.add(field, f"has {count} {unit}, at most {limit} are allowed", reason=Reason.TOO_MANY)
            return False
        return True

    def duration(self, field: str, value: Duration, most: float) -> float:
        """The duration in seconds, which must be positive and at most `most`."""
        number = seconds(value)
        if not 0 < number <= most:
            self.add(field, f"is {number:g} s, must be in (0, {most:g}] s", reason=Reason.OUT_OF_RANGE)
        return number

    def token_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Report the first id outside the vocabulary."""
        # max() is ten times as fast as the loop below, and a prompt may have millions of ids.
        if max(ids, default=0) < vocab_size:
            return
        for i, token in enumerate(ids):
            if token >= vocab_size:
                problem = f"is {token}, but the vocabulary has {vocab_size} tokens"
                self.add(f"{field}[{i}]", problem, reason=Reason.OUT_OF_RANGE)
                return

    def id_set(self, field: str, ids: Sequence[int], limit: int, vocab_size: int) -> tuple[int, ...]:
        """The distinct ids, sorted; at most `limit` of them, all in the vocabulary."""
        if not self.at_most(field, len(ids), limit, "ids"):
            return ()
        self.token_ids(field, ids, vocab_size)
        return tuple(sorted(set(ids)))

    def raise_if_any(self) -> None:
        """Raises RequestError INVALID_ARGUMENT with every violation."""
        if self.found:
            raise RequestError.invalid(self.found)


def logged(text: str) -> str:
    """A caller's text made safe for a log line: printable and short. A valid request id is unchanged."""
    # ascii() escapes control characters, so a caller cannot forge log lines; [1:-1] drops its quotes.
    return ascii(text[:LOGGED_CHARACTERS])[1:-1]


def shown(value: object) -> str:
    """A caller's value made safe for an error message: printable and short."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"
