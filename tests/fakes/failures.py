"""gRPC errors with google.rpc details, as routers send them."""

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"


@dataclass
class Failure:
    """A gRPC status with google.rpc details."""

    code: grpc.StatusCode
    message: str = "it failed"
    details: tuple[Any, ...] = ()

    def abort(self, context: Any) -> None:
        """End the call with this status. Never returns."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        context.set_trailing_metadata([(DETAILS_KEY, status.SerializeToString())])
        context.abort(self.code, self.message)


def bad_request(field_name: str, description: str) -> Failure:
    """INVALID_ARGUMENT with a violation of one field."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field_name, description=description)
    return Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{field_name}: {description}",
        (
            error_details_pb2.BadRequest(field_violations=[violation]),
            error_details_pb2.ErrorInfo(reason="INVALID_ARGUMENT", domain="sluice"),
        ),
    )


def adapter_not_found(name: str, field: str = "lora_id") -> Failure:
    """What a router answers to a request that names an adapter which is not loaded."""
    info = error_details_pb2.ErrorInfo(reason="ADAPTER_NOT_FOUND", domain="sluice")
    return Failure(grpc.StatusCode.NOT_FOUND, f"{field} is {name!r}; no adapter is loaded under this id", (info,))
