"""A router's recovery of requests on an in-memory ring, driven and checked by a state machine."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import msgspec
import pytest
import structlog
from hypothesis.stateful import RuleBasedStateMachine

from router.api.responses import ResponseBuilder, write_stream
from router.api.watchdog import Watchdog
from router.errors import RequestError
from router.parse.model import describe
from router.peers.offers import Offers
from router.peers.placement import Placement
from router.requests import cancel_queue, handover, recovery
from router.requests import dispatcher as dispatch
from router.requests.attempt_sender import AttemptSender
from router.requests.dispatcher import Dispatcher
from router.requests.losses import Losses
from router.requests.recovery import Recovery
from router.requests.registry import RequestCounters, Requests
from router.requests.request_state import RequestState
from router.requests.serving_model import ServingModel
from router.requests.suspects import Suspects
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.router import RecoverySettings
from sluice.tiny_model import path
from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import Phase
from tests.fakes.admission import make_admission
from tests.fakes.memory_ring import MemoryRing, length_of, text_of, token_at

ENGINES, DETOKENIZERS = ("engine-0", "engine-1"), ("detok-0", "detok-1", "detok-2")
BOUND = 2
SETTINGS = RecoverySettings(recovery_timeout=3600.0, recovery_attempts=1 << 40, max_undelivered_tokens=BOUND)
WAITS = (
    (recovery, "RETRY_SECONDS"),
    (recovery, "FIRST_BACKOFF_SECONDS"),
    (dispatch, "FULL_LANE_RETRY_SECONDS"),
    (cancel_queue, "CANCEL_RETRY_SECONDS"),
)
"""Delays that are set to 0, because the machine runs without delays."""
SILENT = structlog.wrap_logger(None, processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])


@cache
def model():
    return describe(open_checkpoint(str(path()), "tiny"))


@dataclass
class Client:
    """One request, and what its client has received."""

    live: RequestState
    reading: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[pb.GenerateStreamResponse] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    """The response of a unary call."""
    error: RequestError | None = None
    task: asyncio.Task | None = None

    async def write(self, event: bytes) -> None:
        await asyncio.sleep(0)
        await self.reading.wait()
        self.events.append(pb.GenerateStreamResponse.FromString(event))


class NoVocabulary:
    def bytes_of(self, token: int) -> bytes:
        return b""

    def omitted_ids(self, skip_special_tokens: bool, keep: tuple[str, ...]) -> frozenset[int]:
        return frozenset()


class RecoverySystem(RuleBasedStateMachine):
    """The real dispatcher, recovery, registry, admission and placement with an in-memory ring. Subclasses add rules."""

    phases: Mapping[str, Phase] = {}
    """Of the engines, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patches = pytest.MonkeyPatch()
        for module, name in WAITS:
            self.patches.setattr(module, name, 0.0)
        self.patches.setattr(handover, "HAND_OVER_TOKENS", 1)
        self.ring = MemoryRing(len(ENGINES), len(DETOKENIZERS), self.phases)
        self.requests = Requests(1000)
        self.admission = make_admission(4, 1000, 10**9)
        self.placement = Placement(1000)
        self.suspects, serving = Suspects(0.01), ServingModel(False, SILENT)
        offers = Offers(self.ring.engines, 4096)
        self.attempts = AttemptSender(
            self.requests, self.ring, self.placement, serving, self.suspects, offers, "router", SILENT
        )
        counters = self.counters = RequestCounters()
        self.recovery = Recovery(self.attempts, self.ring, self.admission, SETTINGS, self.suspects, counters, SILENT)
        self.losses = Losses(self.requests, self.ring, self.attempts, self.recovery, self.suspects, SILENT)
        self.dispatcher = Dispatcher(
            self.requests, self.ring, self.attempts, self.recovery, self.losses, self.suspects, 3600.0, counters
        )
        self.clients: list[Client] = []
        self.numbers = itertools.count(1)

    async def serve(self, client: Client) -> None:
        """What the pipeline does with the request."""
        live = client.live
        try:
            live.on_admitted(await self.admission.acquire(2, 1))
            await self.dispatcher.submit(live)
            if live.spec.streaming:
                await write_stream(live, ResponseBuilder(live, NoVocabulary()), client.write, Watchdog(3600.0), "")
            else:
                await live.log.wait_until(lambda: live.log.complete)
                client.events = [pb.GenerateStreamResponse(done=ResponseBuilder(live, NoVocabulary()).done())]
                answer = await ResponseBuilder(live, NoVocabulary()).response("")
                client.prompt_logprobs = list(answer.prompt_logprobs)
                for output in answer.outputs:
                    delta = pb.Delta(index=output.index, text=output.text, token_ids=output.token_ids)
                    finished = pb.Finished(index=output.index, finish_reason=output.finish_reason)
                    client.events += [pb.GenerateStreamResponse(delta=delta)]
                    client.events += [pb.GenerateStreamResponse(finished=finished)]
        except RequestError as error:
            client.error = error
        finally:
            live.log.close()
            self.dispatcher.close_request(live)
            self.requests.remove(live)

    def do(self, action=None, *arguments) -> None:
        """Run `action` on the event loop, then let other tasks run."""

        async def turns():
            if action is not None:
                action(*arguments)
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def run_engine(self, name, count):
        engine = self.ring.machines[name]
        engine.read_lane()
        engine.step(count)

    def deliver_batch(self, name, count):
        self.do(self.dispatcher.on_text_batch, self.ring.next_batch(name, count))

    def peers(self):
        return [*self.ring.engines.all, *self.ring.detokenizers.all]

    def restore_peers(self):
        for peer in self.peers():
            peer.alive, peer.stalled, peer.heartbeat = True, False, drained(peer.heartbeat, False)
            peer.lane.room = 1 << 60
        self.ring.changed()
        self.do(self.losses.move_off_draining)

    def check_prompt(self, client):
        """The prompt's log-probabilities are complete in `Started`, unless the request was aborted before."""
        prompt = client.live.prompt
        starts = [event.started for event in client.events if event.HasField("started")]
        prompt_logprobs = starts[0].prompt_logprobs if starts else client.prompt_logprobs
        if not prompt_logprobs:
            assert client.live.log.prompt is None or not (starts or client.events)
            return
        assert [logprob.token_id for logprob in prompt_logprobs] == prompt[: len(prompt_logprobs)]
        assert [logprob.rank for logprob in prompt_logprobs] == list(range(len(prompt_logprobs)))
        assert len(prompt_logprobs) == len(prompt) or client.live.aborted
        assert not prompt_logprobs[0].HasField("logprob")

    def check_events(self, client):
        self.check_prompt(client)
        prompt = client.live.prompt
        for index in range(client.live.spec.n):
            deltas = [e.delta for e in client.events if e.HasField("delta") and e.delta.index == index]
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == [token_at(prompt, index, offset) for offset in range(len(tokens))]
            assert "".join(delta.text for delta in deltas) == text_of(tokens)
            finished = [e.finished for e in client.events if e.HasField("finished") and e.finished.index == index]
            assert len(finished) <= 1
            if finished and finished[0].finish_reason == pb.FINISH_REASON_EOS:
                assert len(tokens) == length_of(prompt, index)
            elif finished:
                assert client.live.aborted

    def teardown(self):
        try:
            self.restore_peers()
            for client in self.clients:
                client.reading.set()
            for _ in range(400):
                if all(client.task.done() for client in self.clients) and not self.requests.on_ring:
                    break
                for name in ENGINES:
                    self.run_engine(name, 4)
                for name in DETOKENIZERS:
                    self.deliver_batch(name, 1000)
            for client in self.clients:
                self.check_end(client)
            assert not self.requests.on_ring
            assert not self.requests.open
            assert not self.recovery.waiting
            assert self.admission.live == self.admission.waiting == 0
            assert self.suspects._held is None
            assert not self.suspects._waiting | self.suspects._others_waiting
            assert not any(load.requests or load.sequences for load in self.placement._engines.values())
            assert not any(self.placement._streams.values())
            self.do(self.dispatcher.close)
            assert not asyncio.all_tasks(self.loop)
        finally:
            self.patches.undo()
            self.loop.close()

    def check_end(self, client):
        assert client.task.done()
        if client.task.cancelled():
            return
        assert client.task.exception() is None
        self.check_events(client)
        if client.error is not None:
            assert client.error.code is ErrorCode.DRAINING
            return
        assert sum(event.HasField("done") for event in client.events) == 1
        assert sum(event.HasField("finished") for event in client.events) == client.live.spec.n


def drained(heartbeat, draining=True):
    return msgspec.structs.replace(heartbeat, draining=draining)
