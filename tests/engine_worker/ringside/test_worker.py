"""The engine on real lanes, with a runner that has no model."""

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import zmq
from structlog.testing import capture_logs

from engine_worker.core.intake import fingerprint
from engine_worker.ringside.worker import Worker
from engine_worker.step import DeviceLostError
from sluice.ring.calls import Call, CallAnswer, MethodCall, RankAnswer
from sluice.ring.checkpoint import Checkpoint
from sluice.ring.errors import FinishReason
from sluice.ring.hashing import block_chain, root_hash, short_hash
from sluice.ring.heartbeats import EngineHeartbeat, Hello, KeepAlive
from sluice.ring.inbox import Inbox
from sluice.ring.lane import Lane
from sluice.ring.params import SamplingParams, StopParams, TextParams
from sluice.ring.rows import TokenBatch
from sluice.ring.stats import Stage, StepStats
from sluice.ring.timing import HEARTBEAT_SECONDS
from sluice.ring.wire import Cancel, Flush, Submit
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import ProgressBeacon
from tests.fakes.clock import Clock
from tests.fakes.lanes import FakeLane, connected
from tests.fakes.ports import free_ports
from tests.fakes.processes import wait_until
from tests.fakes.rows import rows_of
from tests.fakes.runner import VOCAB, ScriptedRunner, continuation

pytestmark = pytest.mark.slow

LIMIT = 60.0
"""Seconds for what must happen."""

CHECKPOINT = Checkpoint(
    path=Path("nowhere"),
    name="scripted",
    config={"vocab_size": VOCAB, "max_position_embeddings": 100},
    generation={},
    tokenizer_config={},
    chat_template=None,
    fingerprint="abc",
)
FINGERPRINT = fingerprint(CHECKPOINT, "checkpoint", "none", ())


class World:
    """A worker in a thread, and a router and a detokenizer to talk to it."""

    def __init__(self, folder: Path, runner: ScriptedRunner, **settings) -> None:
        self.context = zmq.Context()
        self.router = Inbox(self.context, f"ipc://{folder}/router", EngineHeartbeat | CallAnswer)
        self.detokenizer = Inbox(self.context, f"ipc://{folder}/detokenizer", TokenBatch | KeepAlive)
        self.port = settings.get("metrics_port")
        given = EngineSettings(model="nowhere", id="engine-0", listen=f"ipc://{folder}/engine", **settings)
        self.worker = Worker(given, CHECKPOINT, runner, structlog.get_logger())
        self.lane = connected(Lane(self.context, self.worker.address))
        self.rows: list = []
        self.opens: list = []
        self.answers: list[CallAnswer] = []
        self.pulses = 0
        self.thread = threading.Thread(target=self.worker.serve, daemon=True)
        self.thread.start()

    def submit(self, request: int, prompt: list[int], max_tokens: int = 5, **more) -> None:
        spec = Submit(
            request=request,
            attempt=0,
            engine_epoch=self.worker.epoch,
            name=str(request),
            prompt=prompt,
            n=1,
            sampling=SamplingParams(),
            stopping=StopParams(max_tokens=max_tokens),
            text=TextParams(),
            priority=2,
            salt="",
            time_limit=None,
            detokenizer=self.detokenizer.address,
            router=self.router.address,
            **more,
        )
        assert self.lane.send(spec)

    def hello(self, cache_known: int = 0, epoch: int = 0) -> None:
        assert self.lane.send(Hello("router-0", self.router.address, cache_known, epoch))

    def heartbeats(self, until) -> list[EngineHeartbeat]:
        """Those that come, up to one that is as it is awaited."""
        end, found = time.monotonic() + LIMIT, []
        while not any(map(until, found)):
            assert time.monotonic() < end
            self.router.wait(0.05)
            for message in self.router.receive():
                (self.answers if isinstance(message, CallAnswer) else found).append(message)
        return found

    def read(self, until) -> None:
        end = time.monotonic() + LIMIT
        while not until():
            assert time.monotonic() < end
            self.detokenizer.wait(0.05)
            for message in self.detokenizer.receive():
                if isinstance(message, KeepAlive):
                    self.pulses += 1
                else:
                    self.opens += message.opens
                    self.rows += rows_of(message)

    def ends(self) -> list:
        return [row.end for row in self.rows if row.end]

    def close(self) -> None:
        self.worker.stop()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()
        self.lane.close()
        self.router.close()
        self.detokenizer.close()
        self.context.term()


def stall(
    runner: ScriptedRunner, before_end: Callable[[], None] = lambda: None
) -> tuple[threading.Event, threading.Event]:
    """(a step was entered, it may go on). `before_end` is called at the end of each step, in the worker's thread."""
    entered, go_on = threading.Event(), threading.Event()
    run = runner.run

    def slow(step):
        entered.set()
        go_on.wait(LIMIT)
        before_end()
        return run(step)

    runner.run = slow
    return entered, go_on


def probe(world: World, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{world.port}{path}", timeout=LIMIT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(num_blocks=16, tokens_per_block=4)


@pytest.fixture
def start(tmp_path, runner, monkeypatch):
    # The router of these tests says one hello or none.
    monkeypatch.setattr("engine_worker.ringside.orphans.CHECK_SECONDS", 3600.0)
    monkeypatch.setattr("engine_worker.ringside.heartbeats.ROUTER_SILENCE_SECONDS", 3600.0)
    worlds = []

    def start(**settings) -> World:
        worlds.append(World(tmp_path, runner, **settings))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_goes_in_and_rows_come_out(start, runner, overlap):
    runner.overlap = overlap
    world = start()
    world.submit(1, [1, 2, 3])
    world.submit(2, [4, 5], max_tokens=63)
    world.read(lambda: len(world.ends()) == 2)
    tokens = [token for row in world.rows if row.request == 1 for token in row.tokens]
    assert tokens == continuation([1, 2, 3], StopParams(max_tokens=5))
    ends = {row.request: row.end.fault and row.end.fault.code for row in world.rows if row.end is not None}
    assert ends == {1: None, 2: "CONTEXT_OVERFLOW"}
    assert {opened.router for opened in world.opens} == {world.router.address}
    world.read(lambda: world.pulses)


def test_what_a_router_asked_for_ends_when_another_takes_its_place(start, runner):
    def wait_for_messages() -> None:
        """They may still be on their way when the first request goes on: its 49 steps take longer than that."""
        if 1 in world.worker._engine.live.requests:
            world.worker._inbox.wait(0.5)

    entered, go_on = stall(runner, wait_for_messages)
    world = start()
    world.hello(epoch=1)
    world.submit(1, [1, 2, 3], max_tokens=50)
    assert entered.wait(LIMIT)
    world.submit(2, [3, 4], max_tokens=50)
    for epoch in (2, 1):
        # Late hellos of the former mean nothing.
        world.hello(epoch=epoch)
    world.submit(3, [5, 6])
    go_on.set()
    world.read(lambda: len(world.ends()) == 3)
    ends = {row.request: row.end.fault.code if row.end.fault else row.end.reason for row in world.rows if row.end}
    assert ends == {1: "ROWS_LOST", 2: "ROWS_LOST", 3: FinishReason.LENGTH}


def test_requests_of_a_router_that_is_silent_end_with_an_error(start, runner, monkeypatch):
    monkeypatch.setattr("engine_worker.ringside.heartbeats.ROUTER_SILENCE_SECONDS", 0.1)
    monkeypatch.setattr("engine_worker.ringside.orphans.CHECK_SECONDS", 0.2)
    entered, go_on = stall(runner)
    world = start()
    world.hello()
    world.submit(1, [1, 2, 3], max_tokens=50)
    assert entered.wait(LIMIT)
    time.sleep(0.3)
    go_on.set()
    world.read(world.ends)
    assert world.ends()[0].fault.code == "ROWS_LOST"


def test_heartbeats_go_to_who_said_hello_and_tell_the_truth(start):
    world = start(max_requests=9)
    world.router.wait(2 * HEARTBEAT_SECONDS)
    assert world.router.receive() == []
    world.hello()
    (first,) = world.heartbeats(bool)[:1]
    assert first.engine == "engine-0"
    assert first.epoch == world.worker.epoch
    assert first.address == world.worker.address
    assert first.fingerprint == FINGERPRINT
    assert first.max_sequence_tokens == 64
    assert not first.draining
    assert first.stats == StepStats(max_requests=9, max_kv_blocks=16, free_kv_blocks=16, tokens_per_kv_block=4)
    world.submit(1, [1, 2, 3])
    world.read(world.ends)
    last = world.heartbeats(lambda heartbeat: heartbeat.stats.iteration == 5)[-1].stats
    assert (last.active_requests, last.free_kv_blocks) == (0, 16)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("bfloat16", {}), ("none", {"weights": "random"}), ("none", {"max_attention_window": (5,)})],
)
def test_what_is_computed_in_another_way_is_another_model(start, runner, dtype, settings):
    runner.dtype = dtype
    assert start(**settings).worker._heartbeat().fingerprint != FINGERPRINT


def test_each_router_is_told_of_the_cache_what_it_has_not_heard(start):
    world = start()
    prompt = list(range(1, 10))
    blocks = [short_hash(block) for block in block_chain(root_hash(FINGERPRINT), prompt, 4)]
    world.hello()
    world.submit(1, prompt, max_tokens=1)
    world.read(world.ends)
    news = world.heartbeats(lambda heartbeat: heartbeat.cache is not None and len(heartbeat.cache.stored) == 2)[
        -1
    ].cache
    assert (set(news.stored), news.removed, news.last) == (set(blocks), [], 2)
    world.hello(cache_known=1)
    news = world.heartbeats(lambda heartbeat: heartbeat.cache is not None and heartbeat.cache.after == 1)[-1].cache
    assert (news.stored, news.removed, news.last, news.whole) == (blocks[1:], [], 2, False)
    world.hello(cache_known=2)
    world.heartbeats(lambda heartbeat: heartbeat.cache is None)
    assert world.lane.send(Flush(world.worker.epoch, 7))
    news = world.heartbeats(lambda heartbeat: heartbeat.cache is not None)[-1].cache
    assert (news.stored, news.last) == ([], 3)
    assert news.whole


def test_a_call_is_answered_idle_and_between_two_steps(start, runner):
    world = start()
    world.hello()
    world.heartbeats(bool)
    # Idle: soon, and not at the next heartbeat.
    for number in (1, 2):
        assert world.lane.send(Call(world.worker.epoch, number, world.router.address, MethodCall("echo", "[5]")))
        world.heartbeats(lambda _, number=number: len(world.answers) == number)
    entered, go_on = stall(runner)
    world.submit(1, [1, 2, 3])
    assert entered.wait(LIMIT)
    assert world.lane.send(Call(world.worker.epoch, 3, world.router.address, MethodCall("nothing")))
    world.heartbeats(bool)
    assert len(world.answers) == 2
    go_on.set()
    world.read(world.ends)
    world.heartbeats(lambda _: len(world.answers) == 3)
    assert [answer.number for answer in world.answers] == [1, 2, 3]
    assert world.answers[0].answers == [RankAnswer(0, "[5]")]
    assert world.answers[2].answers[0].error == "LookupError: no method 'nothing'"


def test_heartbeats_go_on_through_a_long_step(start, runner):
    world = start()
    world.hello()
    entered, go_on = stall(runner)
    world.submit(1, [1])
    assert entered.wait(LIMIT)
    for _ in range(2):
        world.heartbeats(bool)
    go_on.set()
    world.read(world.ends)


def test_a_blocked_step_loses_readiness_soon_and_liveness_late(start, runner, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(
        "engine_worker.ringside.worker.ProgressBeacon", lambda _, status_file: ProgressBeacon(clock, status_file)
    )
    entered, go_on = stall(runner)
    port = free_ports(1)
    world = start(metrics_port=port, ready_stall=1.0, live_stall=30.0)
    assert probe(world, "/readyz") == probe(world, "/livez") == (200, "ok\n")
    world.submit(1, [1, 2, 3])
    assert entered.wait(LIMIT)
    clock.now += 2.0
    assert probe(world, "/readyz") == (503, "the loop has not turned for 2.0 s\n")
    assert probe(world, "/livez") == (200, "ok\n")
    clock.now += 29.0
    assert probe(world, "/livez") == (503, "the loop has not turned for 31.0 s\n")
    go_on.set()
    world.read(world.ends)
    assert wait_until(lambda: probe(world, "/readyz")[0] == 200)
    assert probe(world, "/livez") == (200, "ok\n")
    go_on.clear()
    entered.clear()
    world.submit(2, [1, 2, 3])
    assert entered.wait(LIMIT)
    world.worker.stop()
    assert probe(world, "/readyz") == (503, "it is draining\n")
    go_on.set()


def test_a_stopped_worker_ends_what_lives_and_refuses_the_rest(start, runner):
    world = start()
    world.hello()
    entered, go_on = stall(runner)
    world.submit(1, [1])
    assert entered.wait(LIMIT)
    world.worker.stop()
    world.submit(2, [2])
    go_on.set()
    world.read(lambda: len(world.ends()) == 2)
    ends = {row.request: row.end for row in world.rows if row.end}
    assert ends[1].reason is FinishReason.LENGTH
    assert ends[2].fault.code == "DRAINING"
    world.thread.join(LIMIT)
    assert not world.thread.is_alive()
    assert world.heartbeats(lambda heartbeat: heartbeat.draining)


def test_routers_hear_of_a_drain_at_once(start, runner, monkeypatch):
    """However long the step takes, and however far off the next heartbeat is."""
    monkeypatch.setattr("engine_worker.ringside.heartbeats.HEARTBEAT_SECONDS", 3600.0)
    world = start()
    entered, go_on = stall(runner)
    world.hello()
    world.submit(1, [1])
    assert entered.wait(LIMIT)
    world.worker.stop()
    # A second one follows the first on a new lane.
    assert {heartbeat.draining for heartbeat in world.heartbeats(bool)} == {True}
    go_on.set()


def test_it_leaves_once_its_streams_have_moved_away(start, runner):
    world = start(drain_timeout=3600)
    world.hello()
    # The cancel may still be on its way when the step goes on.
    entered, go_on = stall(runner, lambda: world.worker._inbox.wait(LIMIT))
    world.submit(1, [1], max_tokens=60)
    assert entered.wait(LIMIT)
    world.worker.stop()
    world.heartbeats(lambda heartbeat: heartbeat.draining)
    assert world.lane.send(Cancel(1, 0, world.worker.epoch))
    go_on.set()
    world.read(world.ends)
    assert [end.reason for end in world.ends()] == [FinishReason.ABORTED]
    world.thread.join(LIMIT)
    assert not world.thread.is_alive()


def test_a_detokenizer_that_takes_nothing_does_not_keep_it(start, monkeypatch):
    monkeypatch.setattr("engine_worker.ringside.worker.STUCK_SECONDS", 0.1)
    stuck = FakeLane(room=0)
    monkeypatch.setattr(Worker, "_open_lane", lambda *_: stuck)
    with capture_logs() as logs:
        world = start(drain_timeout=3600)
        world.submit(1, [1], max_tokens=4)
        assert wait_until(lambda: world.worker._outbox.waiting and not world.worker._engine.live.requests)
        world.worker.stop()
        world.thread.join(LIMIT)
    assert not world.thread.is_alive()
    (lost,) = [line for line in logs if line["event"] == "rows_lost"]
    assert (lost["detokenizer"], lost["rows"], lost["opens"]) == (world.detokenizer.address, 1, 1)
    assert [line["rows_lost"] for line in logs if line["event"] == "stopped"] == [1]


def test_a_lost_device_ends_the_process_and_no_request(start, runner, monkeypatch):
    ended = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    with capture_logs() as logs:
        entered, go_on = stall(runner)
        world = start()
        world.submit(1, [1, 2, 3])
        assert entered.wait(LIMIT)
        runner.fail, runner.lost = "before", True
        go_on.set()
        world.thread.join(LIMIT)
    assert not world.thread.is_alive()
    assert [failure.exc_type for failure in ended] == [DeviceLostError]
    assert [line["event"] for line in logs] == ["step_failed", "device_lost", "stopped"]
    assert {"event": "device_lost", "log_level": "error", "error": "the device answers no more", "requests": 1} in logs
    world.detokenizer.wait(0.2)
    assert not any(isinstance(message, TokenBatch) for message in world.detokenizer.receive())


def test_progress_is_turns_of_the_loop_and_stands_still_in_a_step(start, runner):
    world = start()
    world.hello()
    first = world.heartbeats(bool)[0].progress
    world.heartbeats(lambda heartbeat: heartbeat.progress > first)
    entered, go_on = stall(runner)
    world.submit(1, [1])
    assert entered.wait(LIMIT)
    for _ in range(2):
        # One may have been received, and one be on its way, since before the step.
        world.heartbeats(bool)
    stuck = [world.heartbeats(bool)[-1].progress for _ in range(2)]
    assert stuck[0] == stuck[1]
    go_on.set()
    world.heartbeats(lambda heartbeat: heartbeat.progress > stuck[1])


def test_a_request_resumes(start):
    world = start()
    expected = continuation([1, 2, 3], StopParams(max_tokens=8))
    world.submit(1, [1, 2, 3], max_tokens=8, resume={0: expected[:5]})
    world.read(world.ends)
    assert (world.opens[0].resume, world.opens[0].ended) == ({0: expected[:5]}, [])
    assert (world.rows[0].offset, [token for row in world.rows for token in row.tokens]) == (5, expected[5:])


def test_what_outlives_the_drain_is_ended(start, runner):
    world = start(drain_timeout=0.2)
    began, stopped, run = threading.Event(), threading.Event(), runner.run

    def slow(step):
        while began.is_set() and not stopped.wait(0.01):
            # Until the test has read the rows of the first step.
            world.worker._outbox.flush()
        began.set()
        time.sleep(0.05)  # 60 of them outlive the drain
        return run(step)

    runner.run = slow
    world.hello()
    world.submit(1, [1], max_tokens=60)
    world.read(lambda: world.rows)
    world.worker.stop()
    stopped.set()
    world.read(world.ends)
    assert world.ends()[0].fault.code == "DRAINING"
    world.thread.join(LIMIT)
    assert not world.thread.is_alive()


def test_noise_on_the_inbox_is_dropped(start):
    world = start()
    noise = world.context.socket(zmq.PUSH)
    noise.connect(world.worker.address)
    for frame in (b"", b"SL", bytes(range(256))):
        noise.send(frame)
    world.submit(1, [1])
    world.read(world.ends)
    assert world.ends()[0].reason is FinishReason.LENGTH
    noise.close(linger=0)


def test_a_bad_address_hurts_nobody_else(start):
    world = start()
    assert world.lane.send(Hello("router-1", "nonsense"))
    world.hello()
    assert world.heartbeats(bool)
    world.submit(1, [1])
    world.read(world.ends)


def test_corrupt_books_are_reported_when_idle(start, runner):
    with structlog.testing.capture_logs() as logs:
        world = start()
        entered, go_on = stall(runner)
        world.submit(1, [1])
        assert entered.wait(LIMIT)
        world.worker._engine.cache.pool._free.pop()
        go_on.set()
        world.read(world.ends)
        end = time.monotonic() + LIMIT
        while not any(entry["event"] == "cache_corrupt" for entry in logs):
            assert time.monotonic() < end
            time.sleep(0.02)
    assert any("do not add up to the 16 blocks" in entry.get("error", "") for entry in logs)


def test_heartbeats_bring_every_step_once_and_what_became_of_requests(start):
    world = start()
    world.hello()
    world.heartbeats(lambda heartbeat: True)
    world.submit(1, [1, 2, 3], max_tokens=6)
    found = world.heartbeats(lambda heartbeat: any(request.stage is Stage.ENDED for request in heartbeat.requests))
    found += world.heartbeats(lambda heartbeat: heartbeat.stats.iteration == 6)
    assert [step.iteration for heartbeat in found for step in heartbeat.steps] == list(range(1, 7))
    (ended,) = (request for heartbeat in found for request in heartbeat.requests if request.stage is Stage.ENDED)
    assert (ended.request, ended.name, ended.prompt_tokens, ended.generated_tokens) == (1, "1", 3, 6)


def test_heartbeats_report_the_label_of_the_model(start):
    assert start(model_version="v2").worker._heartbeat().model_version == "v2"
