"""The whole ring on this machine: a router, an engine, detokenizers and a gRPC client, each in a separate process.

python -m bench.systems.ring ADDRESS is the client. It stores messages as bytes during the run and parses them
afterwards, so that only Python's gRPC is measured.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from grpc import aio
from msgspec.structs import replace

from bench.harness.calls import spec
from bench.harness.children import SystemProcess, cpu_seconds, serve
from bench.harness.load import Feed, Load, PlannedRequest, Run, Trace
from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb

NAME = "Sluice, through the ring"
METHOD = "/sluice.v1.GenerationService/GenerateStream"


class ThroughRing:
    """Serves loads through a running ring. CPU seconds are those of each role and of the client."""

    name = NAME

    def __init__(self, pids: Mapping[str, int], client: SystemProcess) -> None:
        self._pids = pids
        self._client = client

    def run(self, load: Load) -> Run:
        # The client reports its own CPU time; that of the services is read from /proc.
        before = self._cpu()
        run = self._client.run(load)
        used = {role: seconds - before[role] for role, seconds in self._cpu().items()}
        return replace(run, cpu=used | run.cpu)

    def _cpu(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, pid in self._pids.items():
            role = name.partition("-")[0]
            found[role] = found.get(role, 0.0) + cpu_seconds(pid)
        return found


@contextmanager
def through_ring(model: Path, engine: Mapping[str, Any], logs: Path) -> Iterator[ThroughRing]:
    with (
        (logs / "ring.log").open("a", encoding="utf-8") as log,
        Ring(model, engine_args=engine, observe=lambda line: print(line.text, file=log, flush=True)) as ring,
        SystemProcess("client", "bench.systems.ring", [ring.address], logs / "client.log") as client,
    ):
        yield ThroughRing(ring.pids, client)


async def answer(stream: Any, load: Load) -> Run:
    """Runs all streams over one connection, in one event loop."""
    requests = [_encode(request, load) for request in load.requests]
    seen: list[list[tuple[float, bytes]]] = [[] for _ in requests]
    submitted = [0.0] * len(requests)
    cpu, began = time.process_time(), time.perf_counter()

    async def read_stream(i: int) -> None:
        submitted[i] = time.perf_counter()
        async for message in stream(requests[i]):
            seen[i].append((time.perf_counter(), message))

    feed, pending = Feed(load), set[asyncio.Task[None]]()
    while True:
        pending |= {asyncio.create_task(read_stream(i)) for i in feed.due()}
        if not pending:
            break
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        feed.on_ended(len(ended))
    used = {"client": time.process_time() - cpu}
    traces = [_trace(began, at, messages) for at, messages in zip(submitted, seen, strict=True)]
    return Run(max(trace.arrivals[-1] for trace in traces), used, traces)


def _encode(request: PlannedRequest, load: Load) -> bytes:
    cache, output = pb.KvCacheOptions(salt=load.salt), pb.OutputOptions(token_ids=load.with_ids)
    message = spec(request.prompt, request.max_tokens, kv_cache=cache, output=output)
    return pb.GenerateStreamRequest(spec=message).SerializeToString()


def _trace(began: float, submitted: float, messages: list[tuple[float, bytes]]) -> Trace:
    events = [(at - began, pb.GenerateStreamResponse.FromString(message)) for at, message in messages]
    deltas = [(at, event.delta) for at, event in events if event.delta.token_count]
    return Trace(
        submitted - began,
        [at for at, _ in deltas],
        [delta.token_count for _, delta in deltas],
        [token for _, delta in deltas for token in delta.token_ids],
        max((event.started.cached_tokens for _, event in events), default=0),
    )


def main() -> None:
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    channel = aio.insecure_channel(sys.argv[1])
    stream: Any = channel.unary_stream(METHOD)
    serve(lambda load: loop.run_until_complete(answer(stream, load)))
    loop.run_until_complete(channel.close())


if __name__ == "__main__":
    main()
