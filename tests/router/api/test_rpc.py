"""Calls whose clients disconnect while something is being sent to them."""

import asyncio

import grpc
import pytest
import structlog
from google.protobuf.message import Message
from grpc import aio

from router.api.rpc import Context, admit_all, handler
from router.app import ADMIN
from router.errors import RequestError
from sluice.v1 import admin_pb2
from sluice.wire.errors import ErrorCode


class DisconnectingCall:
    """A call of grpc.aio whose client is disconnecting: sending fails before the cancellation arrives."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()
        self.aborts = 0

    def done(self) -> bool:
        return self.aborts > 0

    def invocation_metadata(self):
        return ()

    async def read(self) -> Message:
        return admin_pb2.StreamStepsRequest()

    async def write(self, _: Message) -> None:
        self._fail()

    async def send_initial_metadata(self, _) -> None:
        self._fail()

    async def abort(self, *_) -> None:
        self.aborts += 1
        self._fail()

    def _fail(self) -> None:
        self.failed.set()
        raise aio.InternalError("Failed execute_batch")


class Servicer:
    """A servicer where every method of AdminService runs `behave`."""

    def __init__(self, behave) -> None:
        self._behave = behave

    def __getattr__(self, name: str):
        return lambda _, context: self._behave(context)


def begin(behave, call: DisconnectingCall) -> tuple[asyncio.Task, list[str]]:
    """A task that runs a call like grpc.aio, and the list of its log events."""
    logs: list[str] = []

    def record(_, __, event):
        logs.append(event["event"])
        raise structlog.DropEvent

    class Details:
        method = "/sluice.v1.AdminService/StreamSteps"
        invocation_metadata = ()

    logger = structlog.wrap_logger(None, processors=[record])
    method = handler(ADMIN, Servicer(behave), admit_all, logger).service(Details())
    return asyncio.create_task(method.stream_stream(None, call)), logs


async def write(context: Context) -> None:
    await context.write(admin_pb2.StreamStepsResponse())


async def send_metadata(context: Context) -> None:
    await context.send_initial_metadata(())


async def refuse(_: Context) -> None:
    raise RequestError(ErrorCode.DRAINING, "not now")


async def abort(context: Context) -> None:
    await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")


@pytest.mark.parametrize("behave", [write, send_metadata])
async def test_a_failure_just_before_a_disconnect_is_reported_counts_as_cancellation(behave, monkeypatch):
    monkeypatch.setattr("router.errors.DISCONNECT_SECONDS", 60.0)
    call = DisconnectingCall()
    task, logs = begin(behave, call)
    await call.failed.wait()
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (call.aborts, logs) == (0, [])


@pytest.mark.parametrize("behave", [refuse, abort])
async def test_a_refusal_that_cannot_be_sent_is_not_logged_as_a_failure(behave, monkeypatch):
    monkeypatch.setattr("router.errors.DISCONNECT_SECONDS", 0.01)
    call = DisconnectingCall()
    task, logs = begin(behave, call)
    with pytest.raises(aio.InternalError):  # harmless: gRPC knows of the disconnect by now
        await task
    assert (call.aborts, logs) == (1, [])


@pytest.mark.parametrize("behave", [write, send_metadata])
async def test_a_failure_while_the_client_is_connected_is_logged(behave, monkeypatch):
    monkeypatch.setattr("router.errors.DISCONNECT_SECONDS", 0.01)
    call = DisconnectingCall()
    task, logs = begin(behave, call)
    with pytest.raises(aio.InternalError):
        await task
    assert (call.aborts, logs) == (1, ["call_failed"])
