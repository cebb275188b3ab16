"""A real gateway between a router of scripted peers and HTTP clients, each a process; only the gateway is measured.

python -m bench.systems.gateway_alone ADDRESS is the clients' process.
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
"""Every event but the first of an answer."""
DONE = b"data: [DONE]"
OWN_EVENTS = 2
"""Of each stream, without text: the role, which comes first and is not counted above, and the end."""


class HttpStreams(msgspec.Struct, frozen=True):
    """So many chats at once, each with as many tokens, one a chunk."""

    streams: int
    tokens: int


class HttpSeen(msgspec.Struct, frozen=True):
    """What the clients saw of them, times in ms, and the gateway's CPU time."""

    seconds: float
    chunks: int
    """With text."""
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
        seen = self._clients.ask(streams, HttpSeen)
        return replace(seen, gateway_seconds=exact_cpu_seconds(self._gateway) - before)


@contextmanager
def gateway_alone(row_seconds: float, logs: Path, checkout: Path = ROOT) -> Iterator[GatewayAlone]:
    """`row_seconds`: of the scripted engine. `checkout`: whose gateway, to compare two versions in one run."""
    log = logs / "gateway.log"
    with scripted_router("http", row_seconds, logs) as (_, router):
        command = [sys.executable, "-m", "gateway", "--routers", router, "--port", "0"]
        with process(command, checkout, log) as gateway:
            address = ready_address(log, gateway)
            clients = SystemProcess("clients", "bench.systems.gateway_alone", [address], logs / "http-clients.log")
            with clients:
                yield GatewayAlone(gateway.pid, clients)


async def _ask(host: str, port: int, asked: HttpStreams) -> HttpSeen:
    arrivals: list[list[float]] = [[] for _ in range(asked.streams)]
    began = time.perf_counter()

    async def one(i: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        submitted, seen = time.perf_counter(), b""
        writer.write(_request(i, asked.tokens))
        while DONE not in seen:
            part = await reader.read(1 << 16)
            if not part:
                raise RuntimeError(f"stream {i} broke off after {len(arrivals[i])} chunks")
            # What may be the beginning of a mark is looked at once more.
            kept = seen[1 - len(EVENT) :]
            arrivals[i] += [time.perf_counter() - submitted] * (kept + part).count(EVENT)
            seen = seen[-len(DONE) :] + part
        writer.close()

    await asyncio.gather(*map(one, range(asked.streams)))
    gaps = [1000 * (b - a) for own in arrivals for a, b in pairwise(own)]
    chunks = sum(map(len, arrivals)) - (OWN_EVENTS - 1) * asked.streams
    first = percentile([1000 * own[0] for own in arrivals], 50)
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
    serve_questions(HttpStreams, lambda asked: loop.run_until_complete(_ask(host, int(port), asked)))


if __name__ == "__main__":
    main()
