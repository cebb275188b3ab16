"""From a service of the .proto files to gRPC handlers: callers are admitted, errors become statuses, broken messages
are refused."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from router.callers import Admit, Call, Caller, Context
from router.errors import RequestError, Violation, abort
from sluice.ring.errors import ErrorCode

MESSAGE_SECONDS = 60.0
"""For the whole message to come, once its call has."""

Behaviour = Callable[[Any, Context], Awaitable[Any]]


async def admit_all(_: Call) -> Caller:
    """For what is open to everybody."""
    return Caller()


def handler(
    service: ServiceDescriptor, servicer: object, admit: Admit, logger: structlog.stdlib.BoundLogger
) -> grpc.GenericRpcHandler:
    """All methods of `service`, each answered by the coroutine of `servicer` with its name in snake case.

    A unary one returns its message; a streaming one writes to the context. `admit` says who calls, or raises
    RequestError.
    """
    return grpc.method_handlers_generic_handler(
        service.full_name, {method.name: _method(method, servicer, admit, logger) for method in service.methods}
    )


def _method(method: MethodDescriptor, servicer: object, admit: Admit, logger: structlog.stdlib.BoundLogger) -> Any:
    """As one that takes a stream: so it is our turn before the message is read, and strangers' never are."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
    make = grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
    return make(
        _guarded(getattr(servicer, name), admit, logger.bind(method=method.name)),
        request_deserializer=_decoder(GetMessageClass(method.input_type)),
        response_serializer=_encode,
    )


def _guarded(
    behaviour: Behaviour, admit: Admit, logger: structlog.stdlib.BoundLogger
) -> Callable[[Any, Call], Awaitable[Any]]:
    async def answer(_: object, call: Call) -> Any:
        try:
            caller = await admit(call)
            return await behaviour(await _read(call), Context(call, caller))
        except RequestError as error:
            await abort(call, error)
        except aio.AbortError:
            raise
        except Exception:
            if call.done():
                # Its end was said, and the client has gone meanwhile: there is nobody to tell.
                raise
            logger.exception("call failed")
            await abort(call, RequestError(ErrorCode.INTERNAL, "an internal error; the server's log has more"))

    return answer


async def _read(call: Call) -> Any:
    """Its one message. Raises RequestError."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            request = await call.read()
    except TimeoutError as error:
        message = f"the message of the call did not come within {MESSAGE_SECONDS:g} s"
        raise RequestError(ErrorCode.SLOW_CLIENT, message) from error
    if request is aio.EOF:
        raise RequestError.invalid([Violation("", "the call brought no message")])
    if isinstance(request, DecodeError):
        raise RequestError.invalid([Violation("", f"the message cannot be read: {request}")])
    return request


def _decoder(message: type[Message]) -> Callable[[bytes], Message | DecodeError]:
    def decode(data: bytes) -> Message | DecodeError:
        try:
            return message.FromString(data)
        except DecodeError as error:
            return error

    return decode


def _encode(message: Message) -> bytes:
    return message.SerializeToString()
