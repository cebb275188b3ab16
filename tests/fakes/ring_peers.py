"""A fake engine and a fake detokenizer behind real ZeroMQ inboxes: they answer submits with scripted rows."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog
import zmq

from engine_worker.kvcache.events import EventLog
from engine_worker.ringside.adapters import AdapterMessage, Adapters
from engine_worker.ringside.prompt_adapters import PromptAdapters
from router.ring_side import RouterInbox
from sluice.ring.cache_events import CacheEvents, ReadCacheEvents
from sluice.ring.calls import Call as EngineCall
from sluice.ring.calls import CallAnswer, MethodCall, RankAnswer
from sluice.ring.errors import Fault, FinishReason
from sluice.ring.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello
from sluice.ring.inbox import Gap, Inbox
from sluice.ring.lane import Lane
from sluice.ring.message import Message
from sluice.ring.prompt_adapters import PromptAdapterMessage, ReadPromptAdapter, StorePromptAdapter
from sluice.ring.rows import End, Started, TextRow, Times
from sluice.ring.stats import RequestStats, StepStats
from sluice.ring.wire import Cancel, Drop, Flush, Submit, ToDetokenizer, ToEngine
from tests.fakes.cache_journal import FakeJournal
from tests.fakes.library import FakeLibrary
from tests.fakes.rows import text_batch

HEARTBEAT_SECONDS = 0.05
TIMES = Times(0.25, 0.5, 0.75)


def end(reason: FinishReason, **fields) -> End:
    return End(reason, TIMES, **fields)


@dataclass
class Call:
    """One submit at a fake engine, and the way back to its router."""

    submit: Submit
    engine: "FakeEngine"
    cancelled: set[int] = field(default_factory=set)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, *rows: TextRow, start: bool = False, cached: int = 0) -> None:
        submit = self.submit
        started = [Started(submit.request, submit.attempt, len(submit.prompt), cached)] if start else []
        await self.engine.ring.detokenizers[submit.detokenizer].send(submit.router, started, list(rows))

    def row(self, offset, tokens, text="", sequence=0, end=None, logprobs=()) -> TextRow:
        return TextRow(
            self.submit.request, self.submit.attempt, sequence, offset, list(tokens), list(logprobs), text, end
        )


Script = Callable[[Call], Coroutine[Any, Any, None]]


def token_at(submit: Submit, sequence: int, offset: int) -> int:
    return (sum(submit.prompt) + 31 * sequence + 7 * offset) % 4000


def text_of(tokens) -> str:
    return "".join(f"<{token}>" for token in tokens)


async def generate(call: Call, pause: float = 0.0, most: int = 24) -> None:
    """Up to `most` tokens per sequence, one row each; ends with LENGTH, or ABORTED when cancelled.

    What the caller has already is passed over: each token depends on the prompt, the sequence and its place alone.
    """
    submit = call.submit
    length = min(submit.stopping.max_tokens, most)
    await call.send(start=True, cached=len(submit.prompt) // 2)
    begin = {sequence: len(submit.resume.get(sequence, ())) for sequence in range(submit.n)}
    live = set(begin).difference(submit.ended)
    complete = [sequence for sequence in sorted(live) if begin[sequence] >= length]
    if complete:
        await call.send(*(call.row(begin[i], [], "", i, end(FinishReason.LENGTH)) for i in complete))
    live.difference_update(complete)
    for offset in range(length):
        rows = []
        for sequence in sorted(live):
            if offset < begin[sequence]:
                continue
            if sequence in call.cancelled:
                rows.append(call.row(offset, [], "", sequence, end(FinishReason.ABORTED)))
                live.discard(sequence)
                continue
            token = token_at(submit, sequence, offset)
            last = end(FinishReason.LENGTH) if offset == length - 1 else None
            rows.append(call.row(offset, [token], text_of([token]), sequence, last))
        if rows:
            await call.send(*rows)
        if not live:
            return
        if pause and rows:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await call.stopped.wait()


async def hang(call: Call) -> None:
    """Says nothing until it is cancelled, then ends every sequence with ABORTED."""
    await call.send(start=True)
    await call.stopped.wait()
    await call.send(*(call.row(0, [], "", i, end(FinishReason.ABORTED)) for i in range(call.submit.n)))


async def refuse(call: Call, fault: Fault) -> None:
    await call.send(
        *(call.row(0, [], "", i, end(FinishReason.ERROR, fault=fault)) for i in range(call.submit.n)), start=True
    )


class FakePeer:
    """An inbox, the routers that said hello, and heartbeats to them."""

    kinds: type

    def __init__(self, ring: "FakeRing", name: str) -> None:
        self.ring = ring
        self.name = name
        self.epoch = random.getrandbits(63)
        self.draining = False
        self.beating = True
        self.reading = True
        self.inbox = Inbox(ring.context, f"ipc://{ring.folder}/{name}", self.kinds)
        self.address = self.inbox.address
        self.lanes: dict[str, Lane] = {}
        self.greeted: dict[str, Hello] = {}
        """The latest hello of each router."""
        self.tasks = {asyncio.create_task(self._read()), asyncio.create_task(self._heartbeat())}

    def lane(self, address: str) -> Lane:
        if address not in self.lanes:
            self.lanes[address] = Lane(self.ring.context, address)
        return self.lanes[address]

    def heartbeat(self, hello: Hello) -> Message:
        raise NotImplementedError

    def take(self, message: object) -> None:
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
                    self.take(message)
            self.turn()
            await asyncio.sleep(0.001)

    def turn(self) -> None:
        """Between two looks at the inbox."""

    async def tell(self) -> None:
        """Until all routers have heard how it is now."""
        while not self._beat():
            await asyncio.sleep(0.001)
        await self.ring.until_read()

    def _beat(self) -> bool:
        """Whether all lanes took the heartbeat. One that is refused would take its steps with it."""
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
    """Runs `ring.script` for each submit."""

    kinds = ToEngine

    def __init__(self, ring: "FakeRing", name: str) -> None:
        self.calls: list[Call] = []
        self.cancels: list[Cancel] = []
        self.flushes: list[tuple[int, int]] = []
        self.flushing = True
        self.answer_call: Callable[[MethodCall], list[RankAnswer] | None] = lambda _: None
        """None: it never answers."""
        self.journal = FakeJournal()
        self.stats = StepStats(max_requests=1000, tokens_per_kv_block=16, max_kv_blocks=1000)
        self.steps: list[StepStats] = []
        """For the next heartbeat."""
        self.requests: list[RequestStats] = []
        """Likewise."""
        self.fingerprint = "fingerprint"
        self.model_version = ""
        self.logits_processors: list[str] = []
        self.library: FakeLibrary | None = None
        self.adapters: Adapters | None = None
        self.hidden_size = 2
        self.image_rows = 0
        self.max_sequence_tokens = 2048
        self.moving: bool | None = None
        """Whether its loop turns; None: heartbeats do not tell."""
        self.progress = 0
        self.events: EventLog | None = None
        """KV cache events."""
        self.reads: list[ReadCacheEvents] = []
        self.answering_reads = True
        self.missed: dict[int, int] = {}
        self.cut_off: list[str] = []
        self.quarantine: int | None = None
        super().__init__(ring, name)
        self.restart()

    def restart(self) -> None:
        """As a process that has just started at this address."""
        self.epoch = random.getrandbits(63)
        send = lambda router, read: self.lane(router).send(read)  # noqa: E731
        self.prompt_adapters = PromptAdapters(self.epoch, send, structlog.get_logger())

    def serve_adapters(self) -> FakeLibrary:
        self.library = FakeLibrary()
        send = lambda router, answer: self.lane(router).send(answer)  # noqa: E731
        self.adapters = Adapters(self.library, self.epoch, send, structlog.get_logger())
        return self.library

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
            cache=self.journal.news(hello.cache_known),
            missed=self.missed,
            progress=self.progress,
            cut_off=self.cut_off,
            quarantine=self.quarantine,
            model_version=self.model_version,
            logits_processors=self.logits_processors,
            has_adapters=self.adapters is not None,
            adapters=None if self.adapters is None else self.adapters.news(hello.adapters_known),
            cache_events=self.events is not None,
            hidden_size=self.hidden_size,
            image_rows=self.image_rows,
            prompt_adapters=self.prompt_adapters.news(hello.prompt_adapters_known),
        )

    def turn(self) -> None:
        if self.adapters is not None:
            self.adapters.finish()

    def take(self, message: Submit | Cancel | Flush | EngineCall | ReadCacheEvents) -> None:
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
            self._take_adapters(message)

    def _take_adapters(self, message: AdapterMessage | PromptAdapterMessage) -> None:
        if isinstance(message, StorePromptAdapter | ReadPromptAdapter):
            self.prompt_adapters.on_message(message)
        elif self.adapters is not None:
            self.adapters.on_message(message)

    def _submit(self, message: Submit) -> None:
        call = Call(message, self)
        self.calls.append(call)
        fault = None if message.adapter is None or self.library is None else self.library.fault(message.adapter)
        self.ring.soon(self.ring.script(call) if fault is None else refuse(call, fault))

    def _cancel(self, message: Cancel) -> None:
        self.cancels.append(message)
        for call in self.calls:
            if (call.submit.request, call.submit.attempt) == (message.request, message.attempt):
                every = range(call.submit.n) if message.sequence is None else (message.sequence,)
                call.cancelled.update(every)
                if len(call.cancelled) == call.submit.n:
                    call.stopped.set()

    def _read_events(self, message: ReadCacheEvents) -> None:
        self.reads.append(message)
        if self.events is not None and self.answering_reads:
            found = self.events.since(message.start)
            answer = CacheEvents(self.name, self.epoch, message.reader, message.start, *found)
            self.lane(message.router).send(answer)


class FakeDetokenizer(FakePeer):
    """Sends what scripts tell it to."""

    kinds = ToDetokenizer

    def __init__(self, ring: "FakeRing", name: str) -> None:
        self.drops: list[Drop] = []
        self.missed: dict[int, int] = {}
        super().__init__(ring, name)

    def heartbeat(self, _: Hello) -> DetokenizerHeartbeat:
        return DetokenizerHeartbeat(self.name, self.epoch, self.address, self.draining, 0, 0, 0.0, missed=self.missed)

    def take(self, message: Drop) -> None:
        self.drops.append(message)

    async def send(self, router: str, started: list[Started], rows: list[TextRow]) -> None:
        batch = text_batch(self.name, started, rows)
        while not self.lane(router).send(batch):
            await asyncio.sleep(0.001)


class FakeRing:
    """Any number of both, in one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.context: zmq.Context = zmq.Context()
        self.engines: dict[str, FakeEngine] = {}
        self.detokenizers: dict[str, FakeDetokenizer] = {}
        self.script: Script = generate
        self.inboxes: list[RouterInbox] = []
        """Of the routers that were started."""
        self.patient = True
        """Routers do not lose peers that are only late; see `lose_only_the_silent`."""
        self.tasks: set[asyncio.Task] = set()

    def soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside everything else, until the ring is closed."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def until_read(self) -> None:
        """Until the routers have read what was sent to them. Otherwise what another peer sends next may overtake it:
        lanes do not wait for each other."""
        peers = (*self.engines.values(), *self.detokenizers.values())
        for inbox in self.inboxes:
            sent = {lane.epoch: lane.sent for peer in peers if (lane := peer.lanes.get(inbox.address))}
            while inbox._loop is not None and any(inbox._expected.get(lane, 0) < count for lane, count in sent.items()):
                await asyncio.sleep(0.001)

    def add_engine(self, name: str = "engine") -> FakeEngine:
        engine = FakeEngine(self, name)
        self.engines[engine.address] = engine
        return engine

    def add_detokenizer(self, name: str = "detok") -> FakeDetokenizer:
        detokenizer = FakeDetokenizer(self, name)
        self.detokenizers[detokenizer.address] = detokenizer
        return detokenizer

    def beats(self, address: str) -> bool:
        """Whether heartbeats of this peer are on their way, and to be waited for."""
        peer = self.engines.get(address) or self.detokenizers.get(address)
        return self.patient and peer is not None and peer.beating

    def moves(self, address: str) -> bool:
        """Whether they tell of progress."""
        return self.beats(address) and address in self.engines and bool(self.engines[address].moving)

    @property
    def calls(self) -> list[Call]:
        return [call for engine in self.engines.values() for call in engine.calls]

    @property
    def cancels(self) -> list[Cancel]:
        return [cancel for engine in self.engines.values() for cancel in engine.cancels]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for peer in (*self.engines.values(), *self.detokenizers.values()):
            await peer.close()
        self.context.term()
