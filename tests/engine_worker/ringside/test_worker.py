"""Requests, calls, probes and faults of the engine on real lanes."""

import threading
import time
import urllib.error
import urllib.request

import pytest
import structlog
import zmq
from structlog.testing import capture_logs

from engine_worker.step import DeviceLostError
from sluice.telemetry.service_status import ProgressBeacon
from sluice.wire.calls import EngineCall, MethodCall, RankAnswer
from sluice.wire.errors import FinishReason
from sluice.wire.heartbeats import Hello
from sluice.wire.params import StopParams
from sluice.wire.rows import TokenBatch
from tests.engine_worker.ringside.world import LIMIT, World, stall
from tests.fakes.clock import Clock
from tests.fakes.ports import free_ports
from tests.fakes.processes import wait_until
from tests.fakes.scripted_tokens import continuation

pytestmark = pytest.mark.slow


def probe(world: World, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{world.port}{path}", timeout=LIMIT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


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
    world.read(lambda: world.keep_alives)


def test_a_call_is_answered_while_idle_and_between_two_steps(start, runner):
    world = start()
    world.hello()
    world.heartbeats(bool)
    # While idle, calls are answered soon, not with the next heartbeat.
    for number in (1, 2):
        assert world.lane.send(EngineCall(world.worker.epoch, number, world.router.address, MethodCall("echo", "[5]")))
        world.heartbeats(lambda _, number=number: len(world.answers) == number)
    entered, may_continue = stall(runner)
    world.submit(1, [1, 2, 3])
    assert entered.wait(LIMIT)
    assert world.lane.send(EngineCall(world.worker.epoch, 3, world.router.address, MethodCall("nothing")))
    world.heartbeats(bool)
    assert len(world.answers) == 2
    may_continue.set()
    world.read(world.ends)
    world.heartbeats(lambda _: len(world.answers) == 3)
    assert [answer.number for answer in world.answers] == [1, 2, 3]
    assert world.answers[0].answers == [RankAnswer(0, "[5]")]
    assert world.answers[2].answers[0].error == "LookupError: no method 'nothing'"


def test_a_blocked_step_loses_readiness_soon_and_liveness_late(start, runner, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(
        "engine_worker.ringside.worker.ProgressBeacon", lambda _, status_file: ProgressBeacon(clock, status_file)
    )
    entered, may_continue = stall(runner)
    port = free_ports(1)
    world = start(metrics_port=port, ready_stall=1.0, live_stall=30.0)
    assert probe(world, "/readyz") == probe(world, "/livez") == (200, "ok\n")
    world.submit(1, [1, 2, 3])
    assert entered.wait(LIMIT)
    clock.now += 2.0
    assert probe(world, "/readyz") == (503, "the loop has not run for 2.0 s\n")
    assert probe(world, "/livez") == (200, "ok\n")
    clock.now += 29.0
    assert probe(world, "/livez") == (503, "the loop has not run for 31.0 s\n")
    may_continue.set()
    world.read(world.ends)
    assert wait_until(lambda: probe(world, "/readyz")[0] == 200)
    assert probe(world, "/livez") == (200, "ok\n")
    may_continue.clear()
    entered.clear()
    world.submit(2, [1, 2, 3])
    assert entered.wait(LIMIT)
    world.worker.stop()
    assert probe(world, "/readyz") == (503, "it is draining\n")
    may_continue.set()


def test_a_lost_device_ends_the_process_without_ending_its_requests(start, runner, monkeypatch):
    """The routers then retry the requests elsewhere."""
    exceptions = []
    monkeypatch.setattr(threading, "excepthook", exceptions.append)
    with capture_logs() as logs:
        entered, may_continue = stall(runner)
        world = start()
        world.submit(1, [1, 2, 3])
        assert entered.wait(LIMIT)
        runner.fail, runner.lost = "before", True
        may_continue.set()
        world.thread.join(LIMIT)
    assert not world.thread.is_alive()
    assert [exception.exc_type for exception in exceptions] == [DeviceLostError]
    assert [line["event"] for line in logs] == ["step_failed", "device_lost", "stopped"]
    assert {"event": "device_lost", "log_level": "error", "error": "the device answers no more", "requests": 1} in logs
    world.detokenizer.wait(0.2)
    assert not any(isinstance(message, TokenBatch) for message in world.detokenizer.receive())


def test_a_request_resumes(start):
    world = start()
    expected = continuation([1, 2, 3], StopParams(max_tokens=8))
    world.submit(1, [1, 2, 3], max_tokens=8, resume={0: expected[:5]})
    world.read(world.ends)
    assert (world.opens[0].resume, world.opens[0].ended) == ({0: expected[:5]}, [])
    assert (world.rows[0].offset, [token for row in world.rows for token in row.tokens]) == (5, expected[5:])


def test_malformed_frames_in_the_inbox_are_dropped(start):
    world = start()
    noise = world.context.socket(zmq.PUSH)
    noise.connect(world.worker.address)
    for frame in (b"", b"SL", bytes(range(256))):
        noise.send(frame)
    world.submit(1, [1])
    world.read(world.ends)
    assert world.ends()[0].reason is FinishReason.LENGTH
    noise.close(linger=0)


def test_an_invalid_address_affects_no_other_router(start):
    world = start()
    assert world.lane.send(Hello("router-1", "nonsense"))
    world.hello()
    assert world.heartbeats(bool)
    world.submit(1, [1])
    world.read(world.ends)


def test_a_corrupt_cache_is_reported_when_idle(start, runner):
    with structlog.testing.capture_logs() as logs:
        world = start()
        entered, may_continue = stall(runner)
        world.submit(1, [1])
        assert entered.wait(LIMIT)
        world.worker._engine.cache.pool._free.pop()
        may_continue.set()
        world.read(world.ends)
        end = time.monotonic() + LIMIT
        while not any(entry["event"] == "cache_corrupt" for entry in logs):
            assert time.monotonic() < end
            time.sleep(0.02)
    assert any("do not add up to the 16 blocks" in entry.get("error", "") for entry in logs)
