"""Routers that receive heartbeats, and other messages to them. test_identity tests the heartbeats' content."""

import structlog
import zmq

from engine_worker.hooks import Report
from engine_worker.kvcache.events import EventLog
from engine_worker.ringside.heartbeats import PAUSE_SECONDS, EventReads, Heartbeats, RouterTable
from engine_worker.ringside.stats_log import StatsLog
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.wire.cache_events import CacheEvents, Created, ReadCacheEvents
from sluice.wire.calls import CallAnswer, RankAnswer
from sluice.wire.heartbeats import EngineHeartbeat, Hello
from sluice.wire.stats import RequestProgress, Stage, StepStats
from sluice.wire.timing import HEARTBEAT_SECONDS, ROUTER_SILENCE_SECONDS
from tests.fakes.clock import Clock
from tests.fakes.lane import MemoryLane


def no_events() -> list:
    return []


def run(routers: RouterTable, clock: Clock, seconds: float) -> None:
    """Let time pass in a process that runs, with its heartbeats."""
    for _ in range(round(seconds / HEARTBEAT_SECONDS)):
        clock.now += HEARTBEAT_SECONDS
        routers.tick()


def test_a_router_gets_heartbeats_until_its_hellos_stop():
    clock = Clock()
    routers = RouterTable(clock)
    routers.on_hello(Hello("r0", "mem://r0"))
    run(routers, clock, ROUTER_SILENCE_SECONDS - 1)
    routers.on_hello(Hello("r1", "mem://r1"))
    assert routers.live().keys() == {"mem://r0", "mem://r1"}
    run(routers, clock, 2)
    assert routers.live().keys() == {"mem://r1"}
    routers.on_hello(Hello("r1", "mem://r1", cache_known=7))
    assert {address: last.hello.cache_known for address, last in routers.last_hellos.items()} == {"mem://r1": 7}


def test_a_pause_of_this_process_does_not_count_as_silence_of_the_routers():
    clock = Clock()
    routers = RouterTable(clock)
    for name in ("r0", "r1"):
        routers.on_hello(Hello(name, f"mem://{name}", cache_known=7))
    run(routers, clock, ROUTER_SILENCE_SECONDS / 2)
    clock.now += 10 * ROUTER_SILENCE_SECONDS
    # A hello may be handled before the first tick after the pause.
    routers.on_hello(Hello("r0", "mem://r0", cache_known=7))
    assert routers.live().keys() == {"mem://r0", "mem://r1"}
    run(routers, clock, ROUTER_SILENCE_SECONDS / 2 - PAUSE_SECONDS - 1)
    assert routers.live().keys() == {"mem://r0", "mem://r1"}
    run(routers, clock, 2)
    assert routers.live().keys() == {"mem://r0"}


def test_only_the_first_hello_of_a_new_router_at_an_address_is_a_replacement():
    routers = RouterTable(Clock())
    replacements = []
    for epoch in (1, 1, 2, 1, 2, 3, 2, 1, 3):
        hello = Hello("r0", "mem://r0", epoch=epoch)
        replacements.append(routers.is_replacement(hello))
        assert routers.on_hello(hello)
    assert replacements == [False, False, True, False, False, True, False, False, False]
    assert not routers.is_replacement(Hello("r1", "mem://r1", epoch=9))


def test_the_table_is_replaced_and_never_modified():
    """Another thread may be reading it."""
    routers = RouterTable(Clock())
    routers.on_hello(Hello("r0", "mem://r0"))
    table = routers.last_hellos
    routers.on_hello(Hello("r1", "mem://r1"))
    assert table.keys() == {"mem://r0"}


def test_steps_and_requests_wait_for_a_router_whose_lane_is_full(monkeypatch):
    lanes = {}

    def open_lane(_, address, *__, **___):
        return lanes.setdefault(address, MemoryLane(address))

    monkeypatch.setattr("engine_worker.ringside.heartbeats.Lane", open_lane)
    routers, stats_log = RouterTable(Clock()), StatsLog()
    routers.on_hello(Hello("r0", "mem://r0"))
    routers.on_hello(Hello("r1", "mem://r1"))
    heartbeat = EngineHeartbeat("e", 1, "mem://e", "f", 64, False, StepStats())
    heartbeats = Heartbeats(
        None, routers, lambda: heartbeat, stats_log, lambda known: None, no_events, structlog.get_logger()
    )
    stats_log.append(Report(StepStats(iteration=1), []))
    heartbeats._send()
    lanes["mem://r1"].full = True
    for iteration in (2, 3):
        request = RequestProgress(7, "r", Stage.GENERATION, 1.0, 2.0, 3.0, 4.0, 5, 0, iteration, 0, 0, 0, 0)
        stats_log.append(Report(StepStats(iteration=iteration), [request]))
        heartbeats._send()
    lanes["mem://r1"].full = False
    heartbeats._send()
    heartbeats._send()
    received = {
        address: [[step.iteration for step in message.steps] for message in lane.messages]
        for address, lane in lanes.items()
    }
    # Routers do not receive statistics from before their first hello.
    assert received == {"mem://r0": [[], [2], [3], [], []], "mem://r1": [[], [2, 3], []]}
    # Only the latest report of a request is sent.
    tokens = [request.generated_tokens for message in lanes["mem://r1"].messages for request in message.requests]
    assert tokens == [3]


def test_if_the_first_heartbeat_on_a_new_lane_fails_another_follows_soon(monkeypatch, tmp_path):
    """The lane is not connected yet when the first one is sent."""
    monkeypatch.setattr("engine_worker.ringside.heartbeats.HEARTBEAT_SECONDS", 600.0)
    with zmq.Context() as context:
        router = Inbox(context, f"ipc://{tmp_path}/router", EngineHeartbeat)
        routers = RouterTable()
        heartbeat = EngineHeartbeat("e", 1, "mem://e", "f", 64, False, StepStats())
        heartbeats = Heartbeats(
            context, routers, lambda: heartbeat, StatsLog(), lambda known: None, no_events, structlog.get_logger()
        )
        monkeypatch.setattr(Lane, "send", refuse_first(Lane.send))
        heartbeats.start()
        routers.on_hello(Hello("r0", router.address))
        heartbeats.send_now()
        assert router.wait(60)
        monkeypatch.setattr("engine_worker.ringside.heartbeats.HEARTBEAT_SECONDS", 0.0)
        heartbeats.stop()
        router.close()


def refuse_first(send):
    """Make a lane refuse its first message, like a lane that is not connected yet."""
    refused = []

    def send_unless_first(lane, message) -> bool:
        if not refused:
            refused.append(message)
            return False
        return send(lane, message)

    return send_unless_first


def test_the_number_of_routers_is_limited(monkeypatch):
    monkeypatch.setattr("engine_worker.ringside.heartbeats.MAX_ROUTERS", 2)
    clock = Clock()
    routers = RouterTable(clock)
    assert [routers.on_hello(Hello("r", f"mem://{i}")) for i in (0, 1, 2, 0)] == [True, True, False, True]
    assert routers.last_hellos.keys() == {"mem://0", "mem://1"}
    run(routers, clock, ROUTER_SILENCE_SECONDS)
    assert routers.on_hello(Hello("r", "mem://2"))


def test_heartbeats_notice_that_all_routers_have_ended(monkeypatch):
    lanes = {}

    def open_lane(_, address, *__, **___):
        return lanes.setdefault(address, MemoryLane(address))

    monkeypatch.setattr("engine_worker.ringside.heartbeats.Lane", open_lane)
    routers = RouterTable(Clock())
    heartbeat = EngineHeartbeat("e", 1, "mem://e", "f", 64, False, StepStats())
    heartbeats = Heartbeats(
        None, routers, lambda: heartbeat, StatsLog(), lambda known: None, no_events, structlog.get_logger()
    )
    assert not heartbeats.routers_ended
    routers.on_hello(Hello("r0", "mem://r0"))
    routers.on_hello(Hello("r1", "mem://r1"))
    observed = []
    for ended in ("", "mem://r1", "mem://r0"):
        heartbeats._send()
        if ended:
            lanes[ended].refused_at = 1.0
            heartbeats._send()
        observed.append(heartbeats.routers_ended)
    assert observed == [False, False, True]
    lanes["mem://r0"].refused_at = None
    heartbeats._send()
    assert not heartbeats.routers_ended, "a router was started again"


def test_answers_to_calls_wait_for_a_full_lane_and_are_sent_only_to_known_routers(monkeypatch):
    lane = MemoryLane("mem://r0")
    monkeypatch.setattr("engine_worker.ringside.heartbeats.Lane", lambda *_, **__: lane)
    routers = RouterTable(Clock())
    routers.on_hello(Hello("r0", "mem://r0"))
    heartbeat = EngineHeartbeat("e", 1, "mem://e", "f", 64, False, StepStats())
    heartbeats = Heartbeats(
        None, routers, lambda: heartbeat, StatsLog(), lambda known: None, no_events, structlog.get_logger()
    )
    heartbeats._send()
    lane.full = True
    heartbeats.answer("mem://r0", CallAnswer(1, 2, [RankAnswer(0, "3")]))
    heartbeats.answer("mem://unknown", CallAnswer(1, 4, []))
    assert heartbeats._send_answers()
    lane.full = False
    assert not heartbeats._send_answers()
    assert [message for message in lane.messages if isinstance(message, CallAnswer)] == [
        CallAnswer(1, 2, [RankAnswer(0, "3")])
    ]


def test_cache_events_are_sent_after_a_heartbeat_to_the_routers_that_requested_them(monkeypatch):
    lane = MemoryLane("mem://r0")
    monkeypatch.setattr("engine_worker.ringside.heartbeats.Lane", lambda *_, **__: lane)
    routers = RouterTable(Clock())
    routers.on_hello(Hello("r0", "mem://r0"))
    heartbeat = EngineHeartbeat("e", 1, "mem://e", "f", 64, False, StepStats())
    reads = EventReads(EventLog(8, 4, 2), "e", 1)
    heartbeats = Heartbeats(
        None, routers, lambda: heartbeat, StatsLog(), lambda known: None, reads.take, structlog.get_logger()
    )
    heartbeats._send()
    assert reads.put(ReadCacheEvents(1, "mem://r0", 5, 0))
    assert reads.put(ReadCacheEvents(1, "mem://unknown", 6, 0))
    lane.full = True
    heartbeats._send_events()
    lane.full = False
    # Events that were not sent are not kept: the router asks again.
    heartbeats._send_events()
    assert not any(isinstance(message, CacheEvents) for message in lane.messages)
    assert reads.put(ReadCacheEvents(1, "mem://r0", 5, 0))
    heartbeats._send_events()
    assert lane.messages[-1] == CacheEvents("e", 1, 5, 0, 0, [Created([4, 2])])


def test_the_number_of_waiting_event_reads_is_limited(monkeypatch):
    monkeypatch.setattr("engine_worker.ringside.heartbeats.MAX_READS", 2)
    reads = EventReads(EventLog(8, 4, 2), "e", 1)
    accepted = [reads.put(ReadCacheEvents(1, "mem://r0", reader, 0)) for reader in (5, 6, 7, 6)]
    assert accepted == [True, True, False, True]
    assert not reads.put(ReadCacheEvents(2, "mem://r0", 8, 0))
    assert [answer.reader for _, answer in reads.take()] == [5, 6]
    assert not list(reads.take())
    assert not EventReads(None, "e", 1).put(ReadCacheEvents(1, "mem://r0", 5, 0))
