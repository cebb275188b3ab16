"""A real router between scripted peers and gRPC clients, each in a separate process. Only the router is measured.

python -m bench.systems.router_alone ADDRESS is the process of the clients.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from grpc import aio
from msgspec.structs import replace

from bench.harness.children import CLOSE_SECONDS, ROOT, SystemProcess, exact_cpu_seconds, serve_questions
from bench.harness.models import TINY
from sluice.loadgen.report import percentile
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import StoppingCriteria

METHOD = "/sluice.v1.GenerationService/GenerateStream"
PROMPT = "def f(x):\n    return x + "
CONNECTIONS = 8
START_SECONDS = 60.0


class Streams(msgspec.Struct, frozen=True):
    """`streams` concurrent streams of `rows` rows each, with `row_tokens` tokens per row."""

    streams: int
    rows: int
    row_tokens: int = 1

    @property
    def tokens(self) -> int:
        return self.streams * self.rows * self.row_tokens


class Seen(msgspec.Struct, frozen=True):
    """What the clients observed, with times in ms, and the router's CPU time."""

    seconds: float
    deltas: int
    tokens: int
    first_token_p50: float
    gap_p50: float
    gap_p99: float
    router_seconds: float = 0.0


class RouterAlone:
    """Serves streams through the router."""

    def __init__(self, router: int, clients: SystemProcess) -> None:
        self._router = router
        self._clients = clients

    def run(self, streams: Streams) -> Seen:
        before = exact_cpu_seconds(self._router)
        seen = self._clients.query(streams, Seen)
        return replace(seen, router_seconds=exact_cpu_seconds(self._router) - before)


@contextmanager
def router_alone(name: str, row_seconds: float, logs: Path, checkout: Path = ROOT) -> Iterator[RouterAlone]:
    """`row_seconds` is the speed of the scripted engine; the router runs from `checkout`, so that two versions can be
    compared in one run."""
    with scripted_router(name, row_seconds, logs, checkout) as (router, address):
        log = logs / f"{name}-clients.log"
        with SystemProcess("clients", "bench.systems.router_alone", [address], log) as clients:
            yield RouterAlone(router, clients)


@contextmanager
def scripted_router(name: str, row_seconds: float, logs: Path, checkout: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Process id and address of a router between scripted peers."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sl"))
        engine, detokenizer, inbox = (f"ipc://{folder}/{name}" for name in ("engine", "detok", "router"))
        peers = [sys.executable, "-m", "bench.systems.scripted_peers", engine, detokenizer, str(row_seconds)]
        stack.enter_context(process(peers, ROOT, logs / f"{name}-peers.log"))
        own = ["--model", str(TINY), "--engines", engine, "--detokenizers", detokenizer, "--listen", inbox]
        command = [sys.executable, "-m", "router", *own, "--port", "0"]
        log = logs / f"{name}-router.log"
        router = stack.enter_context(process(command, checkout, log))
        yield router.pid, ready_address(log, router)


@contextmanager
def process(command: list[str], checkout: Path, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as stream:
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=checkout, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ready_address(log: Path, service: "subprocess.Popen[bytes]") -> str:
    """Address of the service's main port, from its `ready` line. Raises RuntimeError if the service does not start."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and service.poll() is None:
        for line in log.read_bytes().splitlines():
            if line.startswith(b"{") and line.endswith(b"}") and (found := json.loads(line))["event"] == "ready":
                return str(found["address"])
        time.sleep(0.05)
    raise RuntimeError(f"{log.stem} did not start:\n{log.read_text(errors='replace')[-4000:]}")


async def _read_streams(calls: list[Any], plan: Streams) -> Seen:
    arrivals: list[list[float]] = [[] for _ in range(plan.streams)]
    tokens = 0
    began = time.perf_counter()

    async def one(i: int) -> None:
        nonlocal tokens
        submitted, times, at = time.perf_counter(), arrivals[i], 0
        async for event in calls[i % len(calls)](_request(plan, i)):
            count = event.delta.token_count
            if count:
                times.append(time.perf_counter() - submitted)
                if event.delta.token_offset != at:
                    raise RuntimeError(f"stream {i} continues at token {event.delta.token_offset} after {at} tokens")
                at += count
        tokens += at

    await asyncio.gather(*map(one, range(plan.streams)))
    gaps = [1000 * (b - a) for times in arrivals for a, b in pairwise(times)]
    return Seen(
        time.perf_counter() - began,
        sum(map(len, arrivals)),
        tokens,
        percentile([1000 * times[0] for times in arrivals], 50),
        percentile(gaps, 50),
        percentile(gaps, 99),
    )


def _request(plan: Streams, number: int) -> pb.GenerateStreamRequest:
    stopping, output = StoppingCriteria(max_tokens=plan.rows), pb.OutputOptions(stream_interval=plan.row_tokens)
    return pb.GenerateStreamRequest(
        spec=pb.GenerationSpec(text=f"{PROMPT}{number}\n" * 4, stopping=stopping, output=output)
    )


async def _connect(address: str) -> list[Any]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)]
    decode = pb.GenerateStreamResponse.FromString
    encode = pb.GenerateStreamRequest.SerializeToString
    return [channel.unary_stream(METHOD, encode, decode) for channel in channels]


def main() -> None:
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    calls = loop.run_until_complete(_connect(sys.argv[1]))
    serve_questions(Streams, lambda plan: loop.run_until_complete(_read_streams(calls, plan)))


if __name__ == "__main__":
    main()
