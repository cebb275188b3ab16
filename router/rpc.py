"""From a service of the .proto files to gRPC handlers: errors become statuses, broken messages are refused."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from router.errors import Context, RequestError, Violation, abort
from sluice.ring.errors import ErrorCode

Behaviour = Callable[[Any, Context], Awaitable[Any]]


def handler(
    service: ServiceDescriptor, servicer: object, logger: structlog.stdlib.BoundLogger
) -> grpc.GenericRpcHandler:
    """All methods of `service`, each answered by the coroutine of `servicer` with its name in snake case.

    A unary one returns its message; a streaming one writes to the context.
    """
    return grpc.method_handlers_generic_handler(
        service.full_name, {method.name: _method(method, servicer, logger) for method in service.methods}
    )


def _method(method: MethodDescriptor, servicer: object, logger: structlog.stdlib.BoundLogger) -> Any:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    return make(
        _guarded(getattr(servicer, name), logger.bind(method=method.name)),
        request_deserializer=_decoder(GetMessageClass(method.input_type)),
        response_serializer=_encode,
    )


def _guarded(behaviour: Behaviour, logger: structlog.stdlib.BoundLogger) -> Behaviour:
    async def call(request: Message | DecodeError, context: Context) -> Any:
        try:
            if isinstance(request, DecodeError):
                raise RequestError.invalid([Violation("", f"the message cannot be read: {request}")])
            return await behaviour(request, context)
        except RequestError as error:
            await abort(context, error)
        except aio.AbortError:
            raise
        except Exception:
            logger.exception("call failed")
            await abort(context, RequestError(ErrorCode.INTERNAL, "an internal error; the server's log has more"))

    return call


def _decoder(message: type[Message]) -> Callable[[bytes], Message | DecodeError]:
    def decode(data: bytes) -> Message | DecodeError:
        try:
            return message.FromString(data)
        except DecodeError as error:
            return error

    return decode


def _encode(message: Message) -> bytes:
    return message.SerializeToString()
