"""Sends mutated frames to a router: its inbox, membership, placement, dispatcher and streams."""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from router.app import RouterApp
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.services import RouterSettings
from sluice.tiny_model import path
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import generation_pb2_grpc
from sluice.wire.adapters import AdapterChanges, AdapterLoaded, PromptAdapterRead
from sluice.wire.cache_events import CacheEvents, Removed, Stored, Updated
from sluice.wire.calls import CallAnswer, RankAnswer, failed
from sluice.wire.errors import Fault, FinishReason
from sluice.wire.heartbeats import CacheChanges, DetokenizerHeartbeat, EngineHeartbeat, KeepAlive
from sluice.wire.message import Message
from sluice.wire.offers import LORA
from sluice.wire.rows import End, Started, TextRow, Times, TokenLogprob
from sluice.wire.stats import RequestProgress, Stage, StepStats
from sluice.wire.tensors import TensorBatch, TensorRows
from tests.fakes.fake_ring import FakeRing
from tests.fakes.ring_scripts import Call, generate
from tests.fakes.rows import text_batch
from tests.fuzz.adapters import CHANGES, PROMPT_ENTRY, REFUSED, TABLE, UPLOADED
from tests.fuzz.frames import Mutator
from tests.fuzz.sender import TICK_EVERY, Deadline, Sender

TIMES = Times(0.1, 0.2, 0.3)
STREAMS = 2
"""Number of concurrent healthy streams."""


def templates(engine: str, detokenizer: str) -> list[Message]:
    """Messages of every kind that a router receives, from peers whose addresses it knows, but not these epochs."""
    rows = [
        TextRow(11, 0, 0, 0, [5, 6], [TokenLogprob(-0.5, 1, [(5, -0.5)])] * 2, "ab", None),
        TextRow(12, 1, 1, 2, [7], [], "c", End(FinishReason.STOP_STRING, TIMES, stop_string="c")),
        TextRow(13, 0, 0, 0, [], [], "", End(FinishReason.ERROR, TIMES, fault=Fault("STEP_FAILED", "so"))),
    ]
    steps = [StepStats(iteration=3, max_requests=8, max_kv_blocks=64, tokens_per_kv_block=16, time=1.7e9)]
    requests = [RequestProgress(11, "r", Stage.ENDED, 1.7e9, 1.7e9, 1.7e9, 1.7e9, 5, 2, 3, 0, 1, 2, 3)]
    return [
        text_batch("other-detok", [Started(11, 0, 5, 2), Started(12, 1, 4, 0)], rows),
        text_batch("other-detok", [], rows),
        EngineHeartbeat(
            "other-engine",
            77,
            engine,
            "f",
            2048,
            True,
            steps[0],
            [(9, 3)],
            {5: 1},
            "",
            steps,
            requests,
            CacheChanges(0, 3, [1, 2, 3], [], True),
            5,
            offers=frozenset({LORA}),
            adapters=CHANGES,
            prompt_adapters=AdapterChanges(1, [PROMPT_ENTRY]),
        ),
        KeepAlive("other-engine", 77),
        TensorBatch("other-engine", 77, [TensorRows(11, 0, 0, "logits", False, 0, (2, 1), "float32", bytes(8))]),
        AdapterLoaded(77, 9, UPLOADED.version, 8),
        AdapterLoaded(77, 10, fault=REFUSED),
        PromptAdapterRead(77, PROMPT_ENTRY, TABLE),
        DetokenizerHeartbeat("other-detok", 78, detokenizer, True, 3, 1, 10.0, "", {77: 2}),
        CallAnswer(77, 9, [RankAnswer(0, "[1]"), failed(1, "no")]),
        CacheEvents("other-engine", 77, 5, 0, 1, [Stored(5, 4, [1, 2], 35), Removed([5]), Updated(4, 0, 1, 35, 80)]),
    ]


def run(frames: int, seed: int, tick: Callable[[int], None]) -> str:
    """Send `frames` frames. Calls `tick` with the number sent so far. Returns a summary for people."""
    return asyncio.run(_run(frames, seed, tick))


async def _run(frames: int, seed: int, tick: Callable[[int], None]) -> str:
    logs: list[dict[str, Any]] = []

    def keep(_: object, __: str, event: dict[str, Any]) -> None:
        if event["event"] in ("message_failed", "call_failed"):
            logs.append(event)
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[structlog.processors.format_exc_info, keep])
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sl"))
        ring = FakeRing(folder)
        ring.script = answer
        stack.push_async_callback(ring.close)
        engine, detokenizer = ring.add_engine(), ring.add_detokenizer()
        # Two more addresses at which no peer runs, for heartbeats of unknown peers.
        far = f"ipc://{folder}/far-engine", f"ipc://{folder}/far-detok"
        settings = {
            "model": str(path()),
            "engines": (engine.address, far[0]),
            "detokenizers": (detokenizer.address, far[1]),
            "listen": f"ipc://{folder}/router",
            "port": 0,
        }
        router = RouterApp(RouterSettings(**settings), open_checkpoint(str(path()), "tiny"), logger)
        await router.start()
        stack.push_async_callback(router.stop, 0.0)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{router.port}"))
        streams = HealthyStreams(channel)
        while not (router.ring.membership.engines.usable and router.ring.membership.detokenizers.usable):
            await asyncio.sleep(0.01)
        await streams.start()
        tasks = [asyncio.create_task(streams.run()) for _ in range(STREAMS)]
        mutator, sender = Mutator(templates(*far), seed), Sender(ring.context, router.ring.address)
        await flood(sender, mutator, frames, tick, tasks)
        target = streams.done + 2 * STREAMS
        await until(lambda: streams.done >= target, tasks)
        streams.stopping = True
        await asyncio.gather(*tasks)
        sender.close()
        await until(lambda: not (router.ring.requests.open or router.ring.requests.on_ring))
        assert not logs, logs[0]
        inbox, membership = router.ring.inbox, router.ring.membership
        unknown = membership.engines.unknown + membership.detokenizers.unknown
        late = router.ring.dispatcher.late_rows
    return (
        f"{inbox.malformed} malformed, {inbox.gaps} gaps, {unknown} unknown heartbeats, {late} late rows, "
        f"{streams.done} healthy streams"
    )


async def flood(
    sender: Sender, mutator: Mutator, frames: int, tick: Callable[[int], None], tasks: list[asyncio.Task[None]]
) -> None:
    """Send `frames` mutated frames as fast as the router accepts them."""
    for sent in range(1, frames + 1):
        frame = mutator.frame()
        await until(lambda frame=frame: sender.offer(frame), tasks, 0)
        if not sent % TICK_EVERY:
            await asyncio.sleep(0)
            tick(sent)


async def until(condition: Callable[[], bool], tasks: list[asyncio.Task[None]] | tuple[()] = (), rest=0.01) -> None:
    """Poll until the condition is true. Fails if it takes too long or if one of the tasks ends."""
    deadline = Deadline()
    while not condition():
        deadline.check()
        for task in tasks:
            assert not task.done(), task.result()
        await asyncio.sleep(rest)


async def answer(call: Call) -> None:
    """`generate`, unless a mutated frame made the router choose a detokenizer that does not exist."""
    if call.submit.detokenizer in call.engine.ring.detokenizers:
        await generate(call)


class HealthyStreams:
    """Streams of one request. Checks that its text is always the same."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.done = 0
        self.stopping = False
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._text = ""

    async def start(self) -> None:
        """Store the text of an undisturbed stream."""
        self._text = await self._call()
        assert self._text

    async def run(self) -> None:
        """Run streams one after the other until `stopping` is set."""
        while not self.stopping:
            text = await self._call()
            assert text == self._text, (text, self._text)
            self.done += 1

    async def _call(self) -> str:
        spec = pb.GenerationSpec(text="def f(x):")
        spec.stopping.max_tokens = 8
        stream = self._stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=60)
        return "".join([event.delta.text async for event in stream])
