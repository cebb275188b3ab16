"""Bodies that are large, incomplete or sent without a valid token."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2

from gateway.requests.body import UNCHECKED_BYTES
from gateway.service import _ask_about_ring
from tests.fakes.failures import Failure
from tests.fakes.gateway import running
from tests.fakes.processes import LIMIT

UNKNOWN = Failure(
    grpc.StatusCode.UNAUTHENTICATED,
    "metadata `authorization` must be a known token",
    (error_details_pb2.ErrorInfo(reason="UNAUTHENTICATED", domain="sluice"),),
)


def beginning(size: int, sent: int, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {size}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + b" " * sent


async def test_a_token_is_checked_before_a_long_body_is_read(gateway, script):
    script.failure = UNKNOWN
    await _ask_about_ring(gateway.gateway)
    assert gateway.gateway.needs_token
    for headers in ((), ("authorization: Bearer wrong",)):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(beginning(8 << 20, 1000, *headers))
        assert (await asyncio.wait_for(reader.readline(), LIMIT)).startswith(b"HTTP/1.1 401")
        writer.close()
    assert script.metadata[-1]["authorization"] == "Bearer wrong"
    assert gateway.gateway.budget.used == 0


async def test_a_long_body_with_a_token(gateway, script):
    gateway.gateway.needs_token = True
    padding = " " * UNCHECKED_BYTES
    answer = await gateway.post("/v1/completions", {"authorization": "Bearer right"}, prompt="x", user=padding)
    assert answer.status_code == 200
    assert gateway.gateway.budget.used == 0


async def test_incomplete_requests_do_not_count(address):
    async with running(address, max_requests=1) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(beginning(100, 10))
        await asyncio.sleep(0.05)
        assert (await gateway.post("/v1/completions", prompt="x")).status_code == 200
        writer.close()


async def test_bodies_beyond_the_budget(address):
    async with running(address, max_body_bytes=40_000, max_bodies_bytes=100_000) as gateway:
        writers = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(beginning(40_000, 20_000))
            writers.append(writer)
        answer = await asyncio.wait_for(reader.read(4096), LIMIT)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"exceed 50000 bytes together, the limit" in answer
        assert b"retry-after: 1" in answer
        assert gateway.gateway.budget.used == 40_000
        for writer in writers:
            writer.close()
        async with asyncio.timeout(LIMIT):
            while gateway.gateway.budget.used:
                await asyncio.sleep(0.01)


async def test_an_upload_that_made_room(address):
    async with running(address, max_body_bytes=40_000, max_bodies_bytes=100_000) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(beginning(40_000, 30_000))
        budget = gateway.gateway.budget
        async with asyncio.timeout(LIMIT):
            while budget.used < 30_000:
                await asyncio.sleep(0.01)
        budget.share("b").add(50_000)
        budget.share("c").add(25_000)
        assert (await asyncio.wait_for(reader.readline(), LIMIT)).startswith(b"HTTP/1.1 429")
        writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "unknown_url"),
        ("POST", "/v1/completions", 400, "invalid_request_error"),
        ("POST", "/tokenize", 413, "invalid_request_error"),
        ("GET", "/v1/models", 401, "unauthenticated"),
        ("GET", "/v1/models/tiny", 200, None),
    ],
)
async def test_one_log_line_for_each_request(address, script, method, path, status, reason):
    lines = []
    if status == 401:
        script.failure = UNKNOWN
    async with running(address, max_body_bytes=2000) as gateway:
        gateway.gateway.log = Recorder(lines)
        body = b"x" * 3000 if status == 413 else b"{" if method == "POST" else None
        answer = await gateway.http.request(method, path, content=body, headers={"x-sluice-tenant": "ann"})
        assert answer.status_code == status
    (line,) = [line for line in lines if line["event"] == "request_ended"]
    shown = {"/v1/nothing": "other", "/v1/models/tiny": "/v1/models/{model:path}"}.get(path, path)
    assert (line["method"], line["path"], line["status"], line.get("reason")) == (method, shown, status, reason)
    assert line["level"] == ("warning" if reason else "info")
    assert line["tenant"] == "ann"
    assert line["seconds"] >= 0


async def test_the_log_line_of_a_stream_that_fails_after_it_has_begun(address, script):
    lines = []
    script.failure, script.fail_after = UNKNOWN, 1
    async with running(address) as gateway:
        gateway.gateway.log = Recorder(lines)
        events = await gateway.events("/v1/completions", prompt="x")
    assert events[-1]["error"]["code"] == "unauthenticated"
    (line,) = [line for line in lines if line["event"] == "request_ended"]
    assert (line["status"], line["reason"], line["level"]) == (200, "unauthenticated", "warning")


class Recorder:
    """A logger that keeps its lines."""

    def __init__(self, lines: list) -> None:
        self._lines = lines

    def __getattr__(self, level: str):
        return lambda event, **fields: self._lines.append({"level": level, "event": event, **fields})
