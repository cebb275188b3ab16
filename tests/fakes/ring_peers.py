"""Fake engines and detokenizers with real ZeroMQ inboxes. They answer submits with scripted rows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from engine_worker.kvcache.events import EventLog
from engine_worker.ringside.adapters import Adapters, PromptAdapters
from sluice.lanes.inbox import Gap, Inbox
from sluice.lanes.lane import Lane
from sluice.wire.adapters import AdapterMessage, PromptAdapterMessage, ReadPromptAdapter, StorePromptAdapter
from sluice.wire.cache_events import CacheEvents, ReadCacheEvents
from sluice.wire.calls import CallAnswer, EngineCall, MethodCall, RankAnswer
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello, Phase
from sluice.wire.message import Message
from sluice.wire.offers import LORA, offer
from sluice.wire.requests import Cancel, Drop, Flush, Submit, ToDetokenizer, ToEngine
from sluice.wire.rows import Started, TextRow
from sluice.wire.stats import RequestProgress, StepStats
from tests.fakes.cache_journal import FakeJournal
from tests.fakes.library import FakeLibrary
from tests.fakes.ring_scripts import Call, refuse
from tests.fakes.rows import text_batch
from tests.fakes.submits import extras_of

if TYPE_CHECKING:
    from tests.fakes.fake_ring import FakeRing

HEARTBEAT_SECONDS = 0.05


class FakePeer:
    """A service with an inbox, which sends heartbeats to all routers that have sent it a Hello."""

    kinds: type

    def __init__(self, ring: FakeRing, name: str) -> None:
        self.ring = ring
        self.name = name
        self.epoch = random.getrandbits(63)
        self.draining = False
        self.beating = True
        """Whether heartbeats are sent."""
        self.reading = True
        """Whether the inbox is read."""
        self.inbox = Inbox(ring.context, f"ipc://{ring.folder}/{name}", self.kinds)
        self.address = self.inbox.address
        self.lanes: dict[str, Lane] = {}
        self.greeted: dict[str, Hello] = {}
        """The latest Hello of each router, by address."""
        self.tasks = {asyncio.create_task(self._read()), asyncio.create_task(self._heartbeat())}

    def lane(self, address: str) -> Lane:
        if address not in self.lanes:
            self.lanes[address] = Lane(self.ring.context, address)
        return self.lanes[address]

    def heartbeat(self, hello: Hello) -> Message:
        raise NotImplementedError

    def on_message(self, message: object) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for lane in self.lanes.values():
            lane.close()
        self.inbox.close()

    async def _read(self) -> None:
        while True:
            for message in self.inbox.receive() if self.reading else ():
                if isinstance(message, Hello):
                    self.greeted[message.address] = message
                elif not isinstance(message, Gap):
                    self.on_message(message)
            self.after_read()
            await asyncio.sleep(0.001)

    def after_read(self) -> None:
        """Called each time the inbox was read."""

    async def report_state(self) -> None:
        """Send heartbeats and wait until all routers have handled them, so that they know this peer's current state."""
        while not self._beat():
            await asyncio.sleep(0.001)
        await self.ring.until_read()

    def _beat(self) -> bool:
        """Send a heartbeat to every router. Returns whether all lanes accepted it.

        Checks first whether the lane is ready: a refused heartbeat would lose the statistics that it carries.
        """
        sent = [
            self.lane(address).ready() and self.lane(address).send(self.heartbeat(hello))
            for address, hello in self.greeted.items()
        ]
        return all(sent)

    async def _heartbeat(self) -> None:
        while True:
            if self.beating:
                self._beat()
            await asyncio.sleep(HEARTBEAT_SECONDS)


class FakeEngine(FakePeer):
    """An engine that runs `ring.script` for each submit."""

    kinds = ToEngine

    def __init__(self, ring: FakeRing, name: str) -> None:
        self.calls: list[Call] = []
        self.cancels: list[Cancel] = []
        self.flushes: list[tuple[int, int]] = []
        self.flushing = True
        self.answer_call: Callable[[MethodCall], list[RankAnswer] | None] = lambda _: None
        """Returns the ranks' answers to a call of an engine method; None: there is no answer."""
        self.journal = FakeJournal()
        self.stats = StepStats(max_requests=1000, tokens_per_kv_block=16, max_kv_blocks=1000)
        self.steps: list[StepStats] = []
        """Statistics of steps for the next heartbeat."""
        self.requests: list[RequestProgress] = []
        """Statistics of requests for the next heartbeat."""
        self.fingerprint = "fingerprint"
        self.model_version = ""
        self.logits_processors: list[str] = []
        self.library: FakeLibrary | None = None
        self.adapters: Adapters | None = None
        self.hidden_size = 2
        self.image_rows = 0
        self.max_batch_size = 0
        self.max_sequence_tokens = 2048
        self.moving: bool | None = None
        """Whether the step loop makes progress; None: heartbeats do not report progress."""
        self.progress = 0
        self.events: EventLog | None = None
        """KV cache events; None: not supported."""
        self.reads: list[ReadCacheEvents] = []
        self.answering_reads = True
        self.missed: dict[int, int] = {}
        self.cut_off: list[str] = []
        self.quarantine: int | None = None
        self.phase: Phase = "both"
        self.kv_group = ""
        self.kv_keeper = ""
        self.kv_layout = ""
        super().__init__(ring, name)
        self.restart()

    def restart(self) -> None:
        """Become a process that has just started at this address: with a new epoch and without prompt adapters."""
        self.epoch = random.getrandbits(63)
        send = lambda router, read: self.lane(router).send(read)  # noqa: E731
        self.prompt_adapters = PromptAdapters(self.epoch, send, structlog.get_logger())

    def serve_adapters(self) -> FakeLibrary:
        self.library = FakeLibrary()
        send = lambda router, answer: self.lane(router).send(answer)  # noqa: E731
        self.adapters = Adapters(self.library, self.epoch, send, structlog.get_logger())
        return self.library

    @property
    def offers(self) -> frozenset[str]:
        offers = [offer("logits_processor", name) for name in self.logits_processors]
        offers += [LORA] * (self.adapters is not None)
        offers += [offer("prompt_rows", self.hidden_size)] * bool(self.hidden_size)
        offers += [offer("image_rows", self.image_rows)] * bool(self.image_rows)
        return frozenset(offers)

    def heartbeat(self, hello: Hello) -> EngineHeartbeat:
        steps, self.steps = self.steps, []
        requests, self.requests = self.requests, []
        self.progress += bool(self.moving)
        return EngineHeartbeat(
            self.name,
            self.epoch,
            self.address,
            self.fingerprint,
            self.max_sequence_tokens,
            self.draining,
            self.stats,
            self.flushes,
            steps=steps,
            requests=requests,
            cache=self.journal.changes_since(hello.cache_known),
            missed=self.missed,
            progress=self.progress,
            cut_off=self.cut_off,
            quarantine=self.quarantine,
            model_version=self.model_version,
            offers=self.offers,
            adapters=None if self.adapters is None else self.adapters.changes_since(hello.adapters_known),
            cache_events=self.events is not None,
            max_batch_size=self.max_batch_size,
            challenge=hello.challenge,
            kv_group=self.kv_group,
            kv_keeper=self.kv_keeper,
            kv_layout=self.kv_layout,
            phase=self.phase,
            prompt_adapters=self.prompt_adapters.changes_since(hello.prompt_adapters_known),
        )

    def after_read(self) -> None:
        if self.adapters is not None:
            self.adapters.finish()

    def on_message(self, message: Submit | Cancel | Flush | EngineCall | ReadCacheEvents) -> None:
        if message.engine_epoch != self.epoch:
            return
        if isinstance(message, Flush):
            if self.flushing:
                self.journal.flush()
                self.flushes = [*self.flushes, (message.number, 7)]
            return
        if isinstance(message, ReadCacheEvents):
            self._read_events(message)
            return
        if isinstance(message, EngineCall):
            if (answers := self.answer_call(message.call)) is not None:
                self.lane(message.router).send(CallAnswer(self.epoch, message.number, answers))
            return
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._cancel(message)
        else:
            self._on_adapter_message(message)

    def _on_adapter_message(self, message: AdapterMessage | PromptAdapterMessage) -> None:
        if isinstance(message, StorePromptAdapter | ReadPromptAdapter):
            self.prompt_adapters.on_message(message)
        elif self.adapters is not None:
            self.adapters.on_message(message)

    def _submit(self, message: Submit) -> None:
        call = Call(message, self)
        self.calls.append(call)
        adapter = extras_of(message).adapter
        fault = None if adapter is None or self.library is None else self.library.fault(adapter)
        self.ring.soon(self.ring.script(call) if fault is None else refuse(call, fault))

    def _cancel(self, message: Cancel) -> None:
        self.cancels.append(message)
        for call in self.calls:
            if (call.submit.request, call.submit.attempt) == (message.request, message.attempt):
                call.cancelled.update(range(call.submit.n) if message.sequence is None else (message.sequence,))
                if len(call.cancelled) == call.submit.n:
                    call.stopped.set()

    def _read_events(self, message: ReadCacheEvents) -> None:
        self.reads.append(message)
        if self.events is not None and self.answering_reads:
            events = self.events.since(message.start)
            answer = CacheEvents(self.name, self.epoch, message.reader, message.start, *events)
            self.lane(message.router).send(answer)


class FakeDetokenizer(FakePeer):
    """A detokenizer that sends the rows of scripts to routers."""

    kinds = ToDetokenizer

    def __init__(self, ring: FakeRing, name: str) -> None:
        self.drops: list[Drop] = []
        self.missed: dict[int, int] = {}
        super().__init__(ring, name)

    def heartbeat(self, hello: Hello) -> DetokenizerHeartbeat:
        identity = self.name, self.epoch, self.address
        return DetokenizerHeartbeat(*identity, self.draining, 0, 0, 0.0, missed=self.missed, challenge=hello.challenge)

    def on_message(self, message: Drop) -> None:
        self.drops.append(message)

    async def send(self, router: str, started: list[Started], rows: list[TextRow]) -> None:
        batch = text_batch(self.name, started, rows, self.epoch)
        while not self.lane(router).send(batch):
            await asyncio.sleep(0.001)
