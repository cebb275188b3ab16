"""Statuses and their google.rpc details become typed exceptions."""

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from sluice import AsyncClient, Client, SluiceError
from sluice.client import (
    AlreadyExists,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotImplementedByServer,
    Overloaded,
    ServerError,
    Unavailable,
    Unreachable,
    Violation,
    WrongServer,
)
from tests.fakes.failures import Failure, bad_request

RETRY = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))

TABLE = [
    (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
    (grpc.StatusCode.NOT_FOUND, ModelNotFound),
    (grpc.StatusCode.ALREADY_EXISTS, AlreadyExists),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
    (grpc.StatusCode.UNAVAILABLE, Unavailable),
    (grpc.StatusCode.UNIMPLEMENTED, NotImplementedByServer),
    (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
    (grpc.StatusCode.CANCELLED, Cancelled),
    (grpc.StatusCode.INTERNAL, ServerError),
    (grpc.StatusCode.DATA_LOSS, ServerError),
]


@pytest.mark.parametrize(("code", "kind"), TABLE)
async def test_each_status_has_its_exception(script, address, code, kind) -> None:
    script.failure = Failure(code, "why")
    with Client(address, resume_timeout=0) as client:
        for call in (lambda: client.generate("x"), lambda: next(client.stream("x"))):
            with pytest.raises(kind, match="why") as caught:
                call()
            assert type(caught.value) is kind
    async with AsyncClient(address, resume_timeout=0) as client:
        with pytest.raises(kind, match="why"):
            await client.generate("x")
        with pytest.raises(kind, match="why"):
            await anext(client.stream("x"))


def test_violations(script, address) -> None:
    script.failure = bad_request("sampling.top_p", "must be in (0, 1]")
    with Client(address) as client, pytest.raises(InvalidRequest) as caught:
        client.generate("x")
    assert caught.value.violations == (Violation("sampling.top_p", "must be in (0, 1]"),)
    assert caught.value.reason == "INVALID_ARGUMENT"
    assert caught.value.retry_after is None
    assert not caught.value.retryable


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_retry_after(script, address, code) -> None:
    script.failure = Failure(code, details=(RETRY,))
    with Client(address, resume_timeout=0) as client, pytest.raises(SluiceError) as caught:
        client.generate("x")
    assert caught.value.retryable
    assert caught.value.retry_after == 1.5
    async with AsyncClient(address, resume_timeout=0) as client:
        with pytest.raises(SluiceError) as caught:
            await client.generate("x")
    assert caught.value.retry_after == 1.5


def test_broken_details_do_not_hide_the_status(script, address) -> None:
    class Broken(Failure):
        def abort(self, context):
            context.set_trailing_metadata([("grpc-status-details-bin", b"\xff\xff\xff")])
            context.abort(self.code, self.message)

    script.failure = Broken(grpc.StatusCode.UNAVAILABLE, "router lost")
    with Client(address, resume_timeout=0) as client, pytest.raises(Unavailable, match="router lost"):
        client.generate("x")


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", ConnectionLost),
        (grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer", ConnectionLost),
        (grpc.StatusCode.UNKNOWN, "Stream removed", ConnectionLost),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", ConnectionLost),
        (grpc.StatusCode.UNAVAILABLE, "no healthy upstream", Unavailable),
        (grpc.StatusCode.UNAVAILABLE, "Getting metadata from plugin failed with error: no token", Unavailable),
        (grpc.StatusCode.UNAVAILABLE, "Received http2 header with status: 503", WrongServer),
        (grpc.StatusCode.INTERNAL, "Received http2 header with status: 400", WrongServer),
        (grpc.StatusCode.UNAVAILABLE, "DNS resolution failed for x:1", Unreachable),
        (grpc.StatusCode.INTERNAL, "the model failed", ServerError),
    ],
)
def test_errors_of_connections_are_distinguished_from_answers(script, address, code, message, kind) -> None:
    script.failure = Failure(code, message)
    with Client(address, resume_timeout=0) as client, pytest.raises(SluiceError) as caught:
        client.generate("x")
    assert type(caught.value) is kind


async def test_no_server() -> None:
    for unreachable in ("127.0.0.1:1", "nothing.invalid:1"):
        with Client(unreachable) as client, pytest.raises(Unreachable):
            client.generate("x")
        async with AsyncClient(unreachable) as client:
            with pytest.raises(Unreachable):
                await client.generate("x")


async def test_timeout(script, address) -> None:
    script.hangs = True
    with Client(address) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("x", timeout=0.05)
        with pytest.raises(DeadlineExceeded):
            list(client.stream("x", timeout=0.05))
    async with AsyncClient(address, timeout=0.05) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("x")
