"""A real gateway between a router with scripted peers and HTTP clients, each in a separate process. Only the gateway is
measured.

python -m bench.systems.gateway_alone ADDRESS is the process of the clients.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace

from bench.harness.children import ROOT, SystemProcess, exact_cpu_seconds, serve_questions
from bench.systems.router_alone import PROMPT, process, ready_address, scripted_router
from sluice.loadgen.report import percentile

EVENT = b"\ndata: {"
"""Marks every event of a response except the first."""
DONE = b"data: [DONE]"
EVENTS_WITHOUT_TEXT = 2
"""Events without text in each stream: the role, which comes first and is not matched by EVENT, and the end."""


class HttpStreams(msgspec.Struct, frozen=True):
    """`streams` concurrent chats of `tokens` tokens each, one token per chunk."""

    streams: int
    tokens: int


class HttpSeen(msgspec.Struct, frozen=True):
    """What the clients observed, with times in ms, and the gateway's CPU time."""

    seconds: float
    chunks: int
    """Chunks with text."""
    first_chunk_p50: float
    gap_p50: float
    gap_p99: float
    gateway_seconds: float = 0.0


class GatewayAlone:
    """Serves chats through the gateway."""

    def __init__(self, gateway: int, clients: SystemProcess) -> None:
        self._gateway = gateway
        self._clients = clients

    def run(self, streams: HttpStreams) -> HttpSeen:
        before = exact_cpu_seconds(self._gateway)
        seen = self._clients.query(streams, HttpSeen)
        return replace(seen, gateway_seconds=exact_cpu_seconds(self._gateway) - before)


@contextmanager
def gateway_alone(row_seconds: float, logs: Path, checkout: Path = ROOT) -> Iterator[GatewayAlone]:
    """`row_seconds` is the speed of the scripted engine; the gateway runs from `checkout`, so that two versions can be
    compared in one run."""
    log = logs / "gateway.log"
    with scripted_router("http", row_seconds, logs) as (_, router):
        command = [sys.executable, "-m", "gateway", "--routers", router, "--port", "0"]
        with process(command, checkout, log) as gateway:
            address = ready_address(log, gateway)
            clients = SystemProcess("clients", "bench.systems.gateway_alone", [address], logs / "http-clients.log")
            with clients:
                yield GatewayAlone(gateway.pid, clients)


async def _read_streams(host: str, port: int, plan: HttpStreams) -> HttpSeen:
    arrivals: list[list[float]] = [[] for _ in range(plan.streams)]
    began = time.perf_counter()

    async def one(i: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        submitted, seen = time.perf_counter(), b""
        writer.write(_request(i, plan.tokens))
        while DONE not in seen:
            part = await reader.read(1 << 16)
            if not part:
                raise RuntimeError(f"stream {i} ended early, after {len(arrivals[i])} chunks")
            # EVENT may be split over two reads.
            kept = seen[1 - len(EVENT) :]
            arrivals[i] += [time.perf_counter() - submitted] * (kept + part).count(EVENT)
            seen = seen[-len(DONE) :] + part
        writer.close()

    await asyncio.gather(*map(one, range(plan.streams)))
    gaps = [1000 * (b - a) for times in arrivals for a, b in pairwise(times)]
    chunks = sum(map(len, arrivals)) - (EVENTS_WITHOUT_TEXT - 1) * plan.streams
    first = percentile([1000 * times[0] for times in arrivals], 50)
    return HttpSeen(time.perf_counter() - began, chunks, first, percentile(gaps, 50), percentile(gaps, 99))


def _request(number: int, tokens: int) -> bytes:
    content = f"{PROMPT}{number}\n" * 4
    fields = {"model": "", "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "stream": True}
    body = msgspec.json.encode(fields)
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    serve_questions(HttpStreams, lambda plan: loop.run_until_complete(_read_streams(host, int(port), plan)))


if __name__ == "__main__":
    main()
