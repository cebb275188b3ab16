"""gRPC handlers for a service of the .proto files: they authenticate callers and turn errors into statuses."""

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from structlog.stdlib import BoundLogger

from router.access.principal import Admit, Principal
from router.api.watchdog import Watchdog
from router.errors import Call, Reason, RequestError, abort, sent
from sluice.wire.errors import ErrorCode

TRACEPARENT = "traceparent"
MESSAGE_SECONDS = 60.0
"""Timeout for receiving a whole message, from the start of the read."""


@dataclass(frozen=True, slots=True)
class Context:
    """The part of a gRPC call that services may use."""

    _call: Call
    caller: Principal

    @property
    def peer(self) -> str:
        """The client's address in gRPC's notation, such as "ipv4:10.0.0.7:53124"."""
        return self._call.peer()

    @property
    def traceparent(self) -> str:
        """The W3C Trace Context header; empty if it is absent or repeated."""
        values = [str(value) for key, value in self._call.invocation_metadata() or () if key == TRACEPARENT]
        return values[0] if len(values) == 1 else ""

    async def write(self, message: Message) -> None:
        await sent(self._call.write(message.SerializeToString()))

    @property
    def write_bytes(self) -> Callable[[bytes], Awaitable[None]]:
        """Like `write`, but for an encoded message. The caller must await it within `sent`."""
        return self._call.write

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        await sent(self._call.send_initial_metadata(metadata))

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End the call. Always raises."""
        await sent(self._call.abort(code, details))


Behaviour = Callable[[Any, Context], Awaitable[Any]]
Handler = Callable[[Any, Call], Awaitable[Any]]
"""A handler as gRPC calls it, with the client's messages and the call. It returns or writes bytes, so that `guarded`
also covers the encoding."""


async def admit_all(_: Call) -> Principal:
    return Principal()


def handler(service: ServiceDescriptor, servicer: object, admit: Admit, log: BoundLogger) -> grpc.GenericRpcHandler:
    """Handlers for all methods of `service`. Each calls the coroutine method of `servicer` with the same name in snake
    case.

    The coroutine of a unary method returns the response; that of a server-streaming method writes to the context. For a
    client-streaming method it gets an iterator of messages. `admit` may raise RequestError.
    """
    reads = Watchdog(MESSAGE_SECONDS)
    return grpc.method_handlers_generic_handler(
        service.full_name, {method.name: _method(method, servicer, admit, reads, log) for method in service.methods}
    )


def _method(method: MethodDescriptor, servicer: object, admit: Admit, reads: Watchdog, log: BoundLogger) -> Any:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
    behaviour: Behaviour = getattr(servicer, name)

    async def answer(_: object, call: Call) -> bytes | None:
        caller = await admit(call)
        request = _messages(call, reads) if method.client_streaming else await _read(call, reads)
        response = await behaviour(request, Context(call, caller))
        return None if method.server_streaming else response.SerializeToString()

    # Registered as client-streaming, so that callers are authenticated before the body is read.
    make = grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
    return make(
        guarded(answer, log.bind(method=method.name)), request_deserializer=_decoder(GetMessageClass(method.input_type))
    )


def guarded(handler: Handler, log: BoundLogger) -> Handler:
    """Wraps `handler` so that exceptions become statuses. The text of an unexpected exception goes only to the log."""

    async def answer(messages: Any, call: Call) -> Any:
        try:
            return await handler(messages, call)
        except RequestError as error:
            await abort(call, error)
        except aio.AbortError:
            raise
        except Exception:
            if call.done():
                # The status was already sent or the client has disconnected: there is no call left to abort.
                raise
            error_id = secrets.token_hex(8)
            try:
                log.exception("call_failed", error_id=error_id)
            finally:
                await abort(call, RequestError.internal(error_id))

    return answer


async def _messages(call: Call, watchdog: Watchdog) -> AsyncIterator[Any]:
    """Raises RequestError."""
    while (message := await _next(call, watchdog)) is not aio.EOF:
        yield message


async def _read(call: Call, watchdog: Watchdog) -> Any:
    """The call's only message. Raises RequestError."""
    request = await _next(call, watchdog)
    if request is aio.EOF:
        raise RequestError.at("", "the call has no request message", reason=Reason.MISSING)
    return request


async def _next(call: Call, watchdog: Watchdog) -> Any:
    """The next message; aio.EOF after the last one. Raises RequestError."""
    with watchdog.guard(lambda: _late_message(watchdog.seconds)) as guard:
        guard.begin()
        request = await call.read()
    if isinstance(request, DecodeError):
        description = f"the message cannot be read: {request}: it is malformed or nested too deeply"
        raise RequestError.at("", description, reason=Reason.INVALID_FORMAT)
    return request


def _late_message(seconds: float) -> RequestError:
    return RequestError(ErrorCode.SLOW_CLIENT, f"the request message did not arrive within {seconds:g} s")


def _decoder(message: type[Message]) -> Callable[[bytes], Message | DecodeError]:
    def decode(data: bytes) -> Message | DecodeError:
        try:
            return message.FromString(data)
        except DecodeError as error:
            return error

    return decode
