"""Submits, steps, losses, drains, refusals, slow readers, aborts, hand-backs in any order: no token lost or repeated,
each stream has one end, and nothing is left behind.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from functools import cache
from math import inf

import msgspec
import pytest
import structlog
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.api.responses import ResponseBuilder, write_stream
from router.api.watchdog import Watchdog
from router.errors import RequestError
from router.peers.adapters import Adapters
from router.peers.engine_features import EngineFeatures
from router.peers.placement import Placement
from router.requests import cancel_queue, recovery
from router.requests import dispatcher as dispatch
from router.requests.attempt_sender import AttemptSender
from router.requests.dispatcher import Dispatcher
from router.requests.losses import Losses
from router.requests.recovery import Recovery
from router.requests.registry import RequestCounters, Requests
from router.requests.request_phase import RequestPhase
from router.requests.request_state import RequestState
from router.requests.serving_model import ServingModel
from router.requests.suspects import Suspects
from router.validate.model import describe, limits_of
from router.validate.spec import parse
from sluice.ring.checkpoint import open_checkpoint
from sluice.ring.errors import ErrorCode
from sluice.ring.params import RetentionParams
from sluice.settings.router import RecoverySettings
from sluice.settings.services import RouterSettings
from sluice.tiny_model import path
from sluice.v1 import generation_pb2 as pb
from tests.examples import examples
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
FAULTS = ("OVERLOADED", "DRAINING", "STEP_FAILED", "ROWS_LOST", "ENGINE_LOST")
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


class Machine(RuleBasedStateMachine):
    """The real dispatcher, recovery, registry, admission and placement with an in-memory ring."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patches = pytest.MonkeyPatch()
        for module, name in WAITS:
            self.patches.setattr(module, name, 0.0)
        self.ring = MemoryRing(len(ENGINES), len(DETOKENIZERS))
        self.requests = Requests(1000)
        self.admission = make_admission(4, 1000, 10**9)
        self.placement = Placement(1000)
        self.suspects, serving = Suspects(0.01), ServingModel(False, SILENT)
        adapters, features = Adapters(self.ring, "router", 0, {}, SILENT), EngineFeatures(self.ring.engines, 4096)
        self.attempts = AttemptSender(
            self.requests, self.ring, self.placement, serving, self.suspects, features, adapters, "router", SILENT
        )
        counters = RequestCounters()
        self.recovery = Recovery(
            self.attempts, self.ring, self.admission, adapters, SETTINGS, self.suspects, counters, SILENT
        )
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
                client.events = [pb.GenerateStreamResponse(done=ResponseBuilder(live, None).done())]
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

    @initialize(count=st.integers(1, 3))
    def begin(self, count):
        for _ in range(count):
            self.add_request(2, True, True)

    @rule(n=st.integers(1, 3), streaming=st.booleans(), reading=st.booleans(), scored=st.booleans())
    def add_request(self, n, streaming, reading, scored=False):
        prompt = [next(self.numbers), 7, 8, *range(next(self.numbers) % 5 if scored else 0)]
        output = pb.OutputOptions(token_ids=True, prompt_logprobs=0 if scored else None)
        message = pb.GenerationSpec(token_ids=pb.TokenIds(ids=prompt), n=n, output=output)
        parsed = parse(message, model(), limits_of(RouterSettings(model="m"), 2048), streaming)
        live = self.requests.add(parsed)
        live.on_tokenized(prompt, live.spec.sampling, RetentionParams())
        client = Client(live)
        if reading:
            client.reading.set()
        client.task = self.loop.create_task(self.serve(client))
        self.clients.append(client)
        self.do()

    def run_engine(self, name, count):
        engine = self.ring.machines[name]
        engine.read_lane()
        engine.step(count)

    def deliver_batch(self, name, count):
        self.do(self.dispatcher.on_text_batch, self.ring.next_batch(name, count))

    @rule(name=st.sampled_from(ENGINES), count=st.integers(1, 4))
    def step(self, name, count):
        self.run_engine(name, count)

    @rule(name=st.sampled_from(DETOKENIZERS), count=st.integers(1, 8))
    def deliver(self, name, count):
        self.deliver_batch(name, count)

    @rule(name=st.sampled_from(DETOKENIZERS), count=st.integers(1, 8))
    def deliver_twice(self, name, count):
        batch = self.ring.next_batch(name, count)
        self.do(self.dispatcher.on_text_batch, batch)
        self.do(self.dispatcher.on_text_batch, batch)

    @rule(name=st.sampled_from(DETOKENIZERS), count=st.integers(1, 8))
    def lose_text(self, name, count):
        self.ring.next_batch(name, count)
        self.do(self.losses.on_frames_lost, name)

    @rule(name=st.sampled_from(DETOKENIZERS), data=st.data())
    def lose_tokens(self, name, data):
        """The loss is not noticed yet: the next message or heartbeat shows it."""
        wire = self.ring.wires[name]
        if wire:
            epoch, _, _ = wire.popleft()
            if data.draw(st.booleans()):
                self.deliver_batch(name, 3)
            peer = next(peer for peer in self.ring.detokenizers.all if peer.address == name)
            self.do(self.losses.on_frames_lost_between, epoch, peer)

    @rule(name=st.sampled_from(ENGINES))
    def restart_engine(self, name):
        former = self.ring.start_engine(name)
        self.do(self.losses.on_peer_lost, former, "restarted", True, True)

    @rule(name=st.sampled_from(DETOKENIZERS))
    def restart_detokenizer(self, name):
        former = self.ring.start_detokenizer(name)
        self.do(self.losses.on_peer_lost, former, "restarted", True)

    def peers(self):
        return [*self.ring.engines.all, *self.ring.detokenizers.all]

    @rule(data=st.data())
    def fall_silent(self, data):
        peer = data.draw(st.sampled_from(self.peers()))
        peer.alive = False
        self.ring.changed()
        self.do(self.losses.on_peer_lost, peer, "fell silent", False)

    @rule(name=st.sampled_from(ENGINES))
    def stand_still(self, name):
        peer = next(peer for peer in self.ring.engines.all if peer.address == name)
        peer.stalled = True
        self.ring.changed()
        self.do(self.losses.on_peer_lost, peer, "stands still", False)

    @rule(data=st.data())
    def drain(self, data):
        peer = data.draw(st.sampled_from(self.peers()))
        peer.heartbeat, peer.draining_since = _drained(peer.heartbeat), -inf
        self.ring.changed()
        self.do(self.losses.move_off_draining)

    @rule()
    def heal(self):
        self.restore_peers()

    def restore_peers(self):
        for peer in self.peers():
            peer.alive, peer.stalled, peer.heartbeat = True, False, _drained(peer.heartbeat, False)
            peer.lane.room = 1 << 60
        self.ring.changed()
        self.do(self.losses.move_off_draining)

    @rule(name=st.sampled_from(ENGINES), room=st.integers(0, 2))
    def fill_lane(self, name, room):
        next(peer for peer in self.ring.engines.all if peer.address == name).lane.room = room

    @rule(name=st.sampled_from(ENGINES), code=st.sampled_from(FAULTS))
    def fail(self, name, code):
        engine = self.ring.machines[name]
        engine.read_lane()
        engine.fail(code)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), reads=st.booleans())
    def read(self, data, reads):
        client = data.draw(st.sampled_from(self.clients))
        client.reading.set() if reads else client.reading.clear()
        self.do()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def stop_reading(self, data):
        """The client stops reading while everything else continues."""
        data.draw(st.sampled_from(self.clients)).reading.clear()
        for _ in range(2):
            for name in ENGINES:
                self.run_engine(name, 3)
            for name in DETOKENIZERS:
                self.deliver_batch(name, 100)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def abort(self, data):
        client = data.draw(st.sampled_from(self.clients))
        if not client.task.done():
            self.do(self.dispatcher.abort, client.live)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def disconnect(self, data):
        data.draw(st.sampled_from(self.clients)).task.cancel()
        self.do()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def hand_back(self, data):
        client = data.draw(st.sampled_from(self.clients))
        if not client.task.done() and client.live.submitted is not None:
            self.do(self.dispatcher.hand_back, client.live, RequestError(ErrorCode.DRAINING, "draining"))

    @invariant()
    def deliveries_are_right(self):
        for client in self.clients:
            self.check_events(client)

    @invariant()
    def books_agree(self):
        on_ring = self.requests.on_ring
        assert self.admission.live <= 4
        charged = sum(load.requests for load in self.placement._engines.values())
        placed = [live for live in on_ring if live.attempt.engine.epoch in self.placement._engines]
        assert charged == len(placed)
        between = [client.live for client in self.clients if client.live in self.recovery._tasks]
        assert all(live.log.open and not live.aborted for live in between)
        assert {live.phase for live in between} <= {RequestPhase.RECOVERING, RequestPhase.PAUSED}
        for live in (client.live for client in self.clients):
            assert live.on_ring == (live in on_ring)
            if live.on_ring or live.phase is RequestPhase.RECOVERING:
                assert live._permit is not None
            if live.phase in (RequestPhase.PAUSED, RequestPhase.ENDED):
                assert live._permit is None

    def check_prompt(self, client):
        """The prompt's log-probabilities are complete in `Started`, unless the request was aborted before."""
        spec, prompt = client.live.spec, client.live.prompt
        starts = [event.started for event in client.events if event.HasField("started")]
        prompt_logprobs = starts[0].prompt_logprobs if starts else client.prompt_logprobs
        if not prompt_logprobs:
            assert spec.prompt_logprobs is None or not (starts or client.events)
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


def _drained(heartbeat, draining=True):
    return msgspec.structs.replace(heartbeat, draining=draining)


TestRecovery = Machine.TestCase
TestRecovery.settings = examples(60, stateful_step_count=50, suppress_health_check=list(HealthCheck))


def test_an_aborted_request_with_a_slow_client_is_not_paused():
    """Rows that were on their way when it was cancelled must not pause it: it would be submitted again afterwards."""
    machine = Machine()
    machine.add_request(n=1, streaming=True, reading=False)
    (client,) = machine.clients
    (engine,) = [name for name in ENGINES if machine.ring.machines[name].peer.lane.messages]
    machine.run_engine(engine, 1)
    for name in DETOKENIZERS:
        machine.deliver_batch(name, 100)
    machine.run_engine(engine, 3)
    machine.do(machine.dispatcher.abort, client.live)
    for name in DETOKENIZERS:
        machine.deliver_batch(name, 100)
    assert client.live.log.undelivered > BOUND
    machine.teardown()
    assert client.live.attempts == 1
    assert client.events[-2].finished.finish_reason == pb.FINISH_REASON_ABORTED
