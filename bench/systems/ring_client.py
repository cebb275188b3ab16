"""A gRPC client process that puts a load on a ring.

Messages stay bytes while the clock runs and are parsed afterwards, so that only Python's gRPC is measured.

python -m bench.systems.ring_client ADDRESS
"""

import argparse
import asyncio
import time
from typing import Any

import uvloop
from grpc import aio

from bench.harness.calls import spec
from bench.harness.children import serve
from bench.harness.load import Ask, Feed, Load, Run, Trace
from sluice.v1 import generation_pb2 as pb

METHOD = "/sluice.v1.GenerationService/GenerateStream"

Arrival = tuple[float, bytes]


async def answer(stream: Any, load: Load) -> Run:
    """One connection for all streams, in one event loop."""
    requests = [_request(ask, load) for ask in load.asks]
    seen: list[list[Arrival]] = [[] for _ in requests]
    submitted = [0.0] * len(requests)
    cpu, began = time.process_time(), time.perf_counter()

    async def ask(i: int) -> None:
        submitted[i] = time.perf_counter()
        async for message in stream(requests[i]):
            seen[i].append((time.perf_counter(), message))

    feed, pending = Feed(load), set[asyncio.Task[None]]()
    while True:
        pending |= {asyncio.create_task(ask(i)) for i in feed.due()}
        if not pending:
            break
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        feed.on_ended(len(ended))
    used = {"client": time.process_time() - cpu}
    traces = [_trace(began, at, messages) for at, messages in zip(submitted, seen, strict=True)]
    return Run(max(trace.arrivals[-1] for trace in traces), used, traces)


def _request(ask: Ask, load: Load) -> bytes:
    cache, output = pb.KvCacheOptions(salt=load.salt), pb.OutputOptions(token_ids=load.ids)
    asked = spec(ask.prompt, ask.max_tokens, kv_cache=cache, output=output)
    return pb.GenerateStreamRequest(spec=asked).SerializeToString()


def _trace(began: float, submitted: float, messages: list[Arrival]) -> Trace:
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
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    channel = aio.insecure_channel(parser.parse_args().address)
    stream: Any = channel.unary_stream(METHOD)
    serve(lambda load: loop.run_until_complete(answer(stream, load)), Load)
    loop.run_until_complete(channel.close())


if __name__ == "__main__":
    main()
