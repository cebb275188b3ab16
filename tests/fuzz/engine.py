"""Sends mutated frames to an engine with a scripted runner: its inbox, mailbox, core and lanes."""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import structlog
import zmq

from engine_worker.ringside.worker import Worker
from sluice.checkpoint.folder import Checkpoint
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.settings.services import EngineSettings
from sluice.wire.adapters import (
    AdapterEntries,
    AdapterLoaded,
    AdapterPart,
    LoadAdapter,
    PromptAdapterRead,
    ReadPromptAdapter,
    StorePromptAdapter,
    parts_of,
)
from sluice.wire.cache_events import CacheEvents, ReadCacheEvents
from sluice.wire.calls import CallAnswer, EngineCall, MethodCall
from sluice.wire.errors import FinishReason
from sluice.wire.heartbeats import EngineHeartbeat, Hello, KeepAlive
from sluice.wire.message import Message
from sluice.wire.params import (
    Guide,
    GuideKind,
    RangeRetention,
    RetentionParams,
    SamplingParams,
    Speculation,
    StopParams,
    TextParams,
)
from sluice.wire.requests import Cancel, Flush, Submit
from sluice.wire.rows import TokenBatch
from tests.fakes.rows import rows_of
from tests.fakes.scripted_tokens import VOCAB, continuation
from tests.fakes.submits import submit_of
from tests.fuzz.adapters import ADAPTER, BY_PATH, ENTRIES, FOLDER, PROMPT_ENTRY, PROMPT_REMOVED, TABLE, UPLOADED, Runner
from tests.fuzz.frames import Mutator
from tests.fuzz.sender import Deadline, Sender, flood

CHECKPOINT = Checkpoint(
    path=Path("nowhere"),
    name="scripted",
    config={"vocab_size": VOCAB, "max_position_embeddings": 64},
    generation={},
    tokenizer_config={},
    chat_template=None,
    fingerprint="abc",
)
PROMPT = [5, 6, 7, 8, 9]
STOPPING = StopParams(max_tokens=12)
GOOD = 1 << 60
"""The first number of well-formed requests."""

Incoming = TokenBatch | KeepAlive | EngineHeartbeat | CallAnswer | CacheEvents | AdapterLoaded | PromptAdapterRead


def submit(epoch: int, detokenizer: str, router: str, **fields) -> Submit:
    defaults = {
        "request": 11,
        "attempt": 0,
        "engine_epoch": epoch,
        "name": "fuzz",
        "prompt": PROMPT,
        "n": 1,
        "sampling": SamplingParams(),
        "stopping": STOPPING,
        "text": TextParams(),
        "priority": 2,
        "salt": "",
        "time_limit": None,
        "detokenizer": detokenizer,
        "router": router,
    }
    return submit_of(**defaults | fields)


def templates(epoch: int, sink: str) -> list[Message]:
    """Messages of every kind that an engine receives."""
    everything = SamplingParams(
        0.7, 40, 0.9, 0.05, 1.1, 0.5, 0.5, 7, ((3, 1.5), (4, -2.0)), (5,), (), ((6, 7), (6, 8, 9)), (), 3, 2
    )  # fmt: skip
    return [
        submit(epoch, sink, sink),
        submit(
            epoch,
            sink,
            sink,
            request=12,
            attempt=1,
            n=3,
            sampling=everything,
            salt="s",
            time_limit=2.5,
            stopping=StopParams(6, 1, (2,), (3, 4)),
            text=TextParams(stop=("a",)),
            resume={1: [4, 5]},
            ended=[2],
            retention=RetentionParams((RangeRetention(0, 4, 50, 1.5),), 20, 3.0),
            guide=Guide(GuideKind.REGEX, "a+"),
            speculation=Speculation(4, (5, 6)),
        ),
        submit(epoch, sink, sink, request=13, prompt=list(range(20)), stopping=StopParams(3)),
        submit(epoch, sink, sink, request=14, adapter=ADAPTER),
        Cancel(11, 0, epoch),
        Cancel(12, 1, epoch, 1),
        Hello("other-router", sink, 3),
        Flush(epoch, 9),
        EngineCall(epoch, 9, sink, MethodCall("echo", "[1]", "{}", (0, 1))),
        ReadCacheEvents(epoch, sink, 5, 1),
        AdapterEntries(epoch, ENTRIES),
        LoadAdapter(epoch, 9, sink, FOLDER),
        LoadAdapter(epoch, 10, sink, version=UPLOADED.version),
        *parts_of(UPLOADED, epoch),
        # The two parts of an upload, which may arrive in any order or not at all.
        AdapterPart(epoch, BY_PATH.version, 0, 2, b"head"),
        AdapterPart(epoch, BY_PATH.version, 1, 2, b"tail"),
        StorePromptAdapter(epoch, PROMPT_ENTRY, TABLE),
        StorePromptAdapter(epoch, PROMPT_REMOVED),
        ReadPromptAdapter(epoch, PROMPT_ENTRY.id, sink),
    ]


def run(frames: int, seed: int, tick: Callable[[int], None]) -> str:
    """Send `frames` frames. Calls `tick` with the number sent so far. Returns a summary for people."""
    with tempfile.TemporaryDirectory(prefix="sl") as folder, zmq.Context() as context:
        settings = EngineSettings(
            model="nowhere", id="engine", listen=f"ipc://{folder}/engine", max_requests=64, max_batch_size=16,
            max_tokens_per_step=128, drain_timeout=0.0, kv_event_buffer=100,
        )  # fmt: skip
        runner = Runner(64, 4)
        # Memory is measured: do not record all steps.
        runner.steps = DropAll()
        worker = Worker(settings, CHECKPOINT, runner, structlog.get_logger())
        thread = threading.Thread(target=worker.serve, daemon=True)
        thread.start()
        sink = Inbox(context, f"ipc://{folder}/sink", Incoming)
        streams = HealthyStreams(context, f"ipc://{folder}/good", worker)
        mutator, sender = Mutator(templates(worker.epoch, sink.address), seed), Sender(context, worker.address)
        deadline = Deadline()

        def turn() -> None:
            sink.wait(0.001)
            sink.receive()
            streams.turn()
            deadline.check()
            assert thread.is_alive(), "the engine has ended"

        flood(frames, mutator, sender, deadline, turn, tick)
        deadline.renew()
        target = streams.done + 3
        while streams.done < target:
            turn()
        assert runner.violations == []
        sender.close()
        streams.close()
        worker.stop()
        thread.join()
        sink.close()
        engine = worker._engine
        assert not engine.live.requests
        engine.cache.check()
        inbox, dropped = worker._inbox, sum(worker._mailbox.dropped.values())
    refused = sum(worker._mailbox.refused.values())
    return (
        f"{inbox.malformed} malformed, {inbox.gaps} gaps, {dropped} dropped, {refused} refused, "
        f"{engine.live.num_begun} begun, {runner.failures} steps failed, {streams.done} healthy streams"
    )


class DropAll(list):
    """A list that stays empty."""

    def append(self, _: object) -> None:
        pass


class HealthyStreams:
    """Well-formed requests, one after the other. Checks that the tokens of each are right."""

    def __init__(self, context: zmq.Context, address: str, worker: Worker) -> None:
        self.done = 0
        self._worker = worker
        self._inbox = Inbox(context, address, Incoming)
        self._lane = Lane(context, worker.address)
        self._request = GOOD
        self._submitted = False
        self._tokens: list[int] = []
        self._turns = 0

    def turn(self) -> None:
        """Send a Hello now and then, submit a request if none is running, and read what has arrived."""
        if not self._turns % 100:
            self._lane.send(Hello("router", self._inbox.address))
        self._turns += 1
        if not self._submitted:
            address = self._inbox.address
            spec = submit(self._worker.epoch, address, address, request=self._request, priority=3)
            self._submitted = self._lane.send(spec)
        for message in self._inbox.receive():
            for row in rows_of(message) if isinstance(message, TokenBatch) else ():
                if row.request == self._request:
                    self._on_row(row)

    def _on_row(self, row) -> None:
        assert row.offset == len(self._tokens)
        self._tokens += row.tokens
        if row.end is None:
            return
        # A mutated Submit may fill the engine or demand to run alone. A router would then choose another engine.
        refused = row.end.fault is not None and row.end.fault.code in ("OVERLOADED", "QUARANTINE")
        if not refused:
            assert row.end.reason is FinishReason.LENGTH, row.end
            assert self._tokens == continuation(PROMPT, STOPPING)
            self.done += 1
        self._request += 1
        self._submitted, self._tokens = False, []

    def close(self) -> None:
        self._lane.close()
        self._inbox.close()
