"""Submits, steps, losses, drains, refusals, slow readers, aborts, hand-backs in any order: no token lost or repeated,
each stream has one end, and nothing is left behind.
"""

from math import inf
from typing import ClassVar

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from router.errors import RequestError, Violations
from router.parse.model import limits_of
from router.parse.parse import parse
from router.requests.part import parse_parts
from router.requests.request_state import RequestPhase
from sluice.settings.services import RouterSettings
from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import Phase
from sluice.wire.params import RetentionParams
from tests.examples import examples
from tests.fakes.features import make_features
from tests.router.requests.recovery_system import BOUND, DETOKENIZERS, ENGINES, Client, RecoverySystem, drained, model

FAULTS = ("OVERLOADED", "DRAINING", "STEP_FAILED", "ROWS_LOST", "ENGINE_LOST")


class Machine(RecoverySystem):
    """Random events for a RecoverySystem."""

    @initialize(count=st.integers(1, 3))
    def begin(self, count):
        for _ in range(count):
            self.add_request(2, True, True)

    @rule(n=st.integers(1, 3), streaming=st.booleans(), reading=st.booleans(), scored=st.booleans())
    def add_request(self, n, streaming, reading, scored=False):
        prompt = [next(self.numbers), 7, 8, *range(next(self.numbers) % 5 if scored else 0)]
        output = pb.OutputOptions(token_ids=True, prompt_logprobs=0 if scored else None)
        message = pb.GenerationSpec(token_ids=pb.TokenIds(ids=prompt), n=n, output=output)
        limits, bad = limits_of(RouterSettings(model="m"), 2048), Violations()
        parsed = parse(message, model(), limits, streaming, bad)
        parts = self.loop.run_until_complete(parse_parts(make_features(model(), limits), message, "tiny", bad))
        live = self.requests.add(parsed, parts=parts)
        live.on_tokenized(prompt, live.spec.sampling, RetentionParams())
        client = Client(live)
        if reading:
            client.reading.set()
        client.task = self.loop.create_task(self.serve(client))
        self.clients.append(client)
        self.do()

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
        peer = next(peer for peer in self.ring.detokenizers.all if peer.address == name)
        self.do(self.losses.on_frames_lost, peer.epoch)

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
        peer.heartbeat, peer.draining_since = drained(peer.heartbeat), -inf
        self.ring.changed()
        self.do(self.losses.move_off_draining)

    @rule()
    def heal(self):
        self.restore_peers()

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


TestRecovery = Machine.TestCase
TestRecovery.settings = examples(40, stateful_step_count=50, suppress_health_check=list(HealthCheck))


class HandingOver(Machine):
    """The same events in a ring whose first engine hands over to the second one."""

    phases: ClassVar[dict[str, Phase]] = {ENGINES[0]: "prefill", ENGINES[1]: "decode"}


TestHandingOver = HandingOver.TestCase
TestHandingOver.settings = examples(40, stateful_step_count=50, suppress_health_check=list(HealthCheck))


def test_a_request_is_handed_over_in_the_machine():
    machine = HandingOver()
    machine.begin(3)
    machine.teardown()
    assert machine.counters.handovers["continued"] == 3
    assert [client.live.attempts for client in machine.clients] == [2, 2, 2]


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
