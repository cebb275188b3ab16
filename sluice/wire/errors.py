"""Finish reasons, and error codes with their gRPC status and retry delay."""

from enum import Enum, IntEnum

import msgspec


class FinishReason(IntEnum):
    """Why a sequence ended. Up to TIME_LIMIT the numbers are those of sluice.v1.FinishReason."""

    RUNNING = 0
    EOS = 1
    STOP_STRING = 2
    STOP_TOKEN = 3
    LENGTH = 4
    ABORTED = 5
    TIME_LIMIT = 6
    ERROR = 7
    """The terminal row has a `Fault`, and the client receives a gRPC status."""
    HANDED_OVER = 8
    """The attempt ends here, not the sequence: it was submitted with `StopParams.hands_over`."""


CONTINUED = frozenset({FinishReason.ERROR, FinishReason.HANDED_OVER})
"""Ends of an attempt after which the sequence may continue in another one."""


class ErrorCode(Enum):
    """The `reason` of google.rpc.ErrorInfo."""

    status: str
    """Name of the gRPC status code."""
    retry_after: float | None
    """Seconds, for google.rpc.RetryInfo. None: do not retry."""

    def __new__(cls, status: str, retry_after: float | None) -> "ErrorCode":
        """Gives members distinct numbers as values. Members with equal values would be aliases of each other."""
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.status = status
        member.retry_after = retry_after
        return member

    INVALID_ARGUMENT = ("INVALID_ARGUMENT", None)
    CONTEXT_OVERFLOW = ("INVALID_ARGUMENT", None)
    MODEL_NOT_FOUND = ("NOT_FOUND", None)
    MODEL_CHANGED = ("FAILED_PRECONDITION", None)
    ADAPTER_NOT_FOUND = ("NOT_FOUND", None)
    ADAPTER_MISSING = ("FAILED_PRECONDITION", None)
    DUPLICATE_REQUEST = ("ALREADY_EXISTS", None)
    NOT_BUILT_YET = ("UNIMPLEMENTED", None)
    OVERLOADED = ("RESOURCE_EXHAUSTED", 1.0)
    NO_ENGINE = ("UNAVAILABLE", 1.0)
    NO_DETOKENIZER = ("UNAVAILABLE", 1.0)
    ENGINE_LOST = ("UNAVAILABLE", 0.5)
    DETOKENIZER_LOST = ("UNAVAILABLE", 0.5)
    ROWS_LOST = ("UNAVAILABLE", 0.5)
    DRAINING = ("UNAVAILABLE", 0.5)
    QUARANTINE = ("UNAVAILABLE", 0.5)
    SLOW_CLIENT = ("RESOURCE_EXHAUSTED", None)
    UNAUTHENTICATED = ("UNAUTHENTICATED", None)
    FORBIDDEN = ("PERMISSION_DENIED", None)
    AUTH_UNAVAILABLE = ("UNAVAILABLE", 1.0)
    GUIDE_TOO_COMPLEX = ("INVALID_ARGUMENT", None)
    NOTHING_TO_SAMPLE = ("INVALID_ARGUMENT", None)
    INVALID_LOGITS = ("INTERNAL", None)
    PROCESSOR_FAILED = ("INTERNAL", None)
    STEP_FAILED = ("INTERNAL", None)
    POISON = ("INTERNAL", None)
    TEXT_FAILED = ("INTERNAL", None)
    INTERNAL = ("INTERNAL", None)


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """The error that ended a sequence, which its terminal row contains."""

    code: str
    """Name of an `ErrorCode`."""
    message: str
    field: str = ""
    """Path of the request's field at fault, such as "spec.guided.regex". The message may quote the field's value."""

    @property
    def error_code(self) -> ErrorCode:
        """The code. INTERNAL if this build does not know its name."""
        return ErrorCode.__members__.get(self.code, ErrorCode.INTERNAL)
