"""Lost rows, engines and routers: which streams end, and what is reported to routers."""

from structlog.testing import capture_logs

from sluice.lanes.inbox import Gap
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.heartbeats import Hello, KeepAlive
from sluice.wire.timing import ENGINE_SILENCE_SECONDS, ROUTER_SILENCE_SECONDS
from tests.detok_service.bench import LENGTH, Bench, batch, opened, row


def test_missing_rows_fail_only_their_stream():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), row(2, 0, [0]), opens=[opened(1), opened(2)]))
    bench.handle(batch(row(1, 2, [2]), row(2, 1, [1])))
    bench.handle(batch(row(1, 3, [], LENGTH), row(2, 2, [], LENGTH)))
    assert bench.texts() == {(1, 0): ("a", ErrorCode.ROWS_LOST), (2, 0): ("ab", FinishReason.LENGTH)}


def test_a_gap_fails_the_streams_of_that_engine():
    """A terminal row may be among the lost messages. Without this rule, its stream would never end."""
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), opens=[opened(1)]), batch(row(2, 0, [0]), opens=[opened(2)], engine="other"))
    with capture_logs() as logs:
        bench.handle(
            batch(row(1, 1, [1])),
            Gap(77, 3),
            batch(row(1, 9, [2]), row(3, 0, [0]), opens=[opened(3)]),
            batch(row(2, 1, [1]), engine="other"),
        )
    assert bench.texts() == {
        (1, 0): ("ab", ErrorCode.ROWS_LOST),
        (2, 0): ("ab", None),
        (3, 0): ("a", None),
    }
    assert bench.service.decode_loop.unknown_rows == 0
    assert [(line["event"], line["missed"]) for line in logs] == [("frames_lost", 3)]
    bench.handle(Gap(77, 1), KeepAlive("engine", 1))
    assert bench.texts()[3, 0] == ("a", ErrorCode.ROWS_LOST)


def test_frames_that_a_previous_process_may_have_received_are_reported_without_a_warning():
    bench = Bench()
    with capture_logs() as logs:
        bench.handle(Hello("r", "router"), Gap(77, 3, lane_known=False), KeepAlive("engine", 1))
        bench.heartbeat()
    assert [(line["event"], line["log_level"]) for line in logs] == [("lane_taken_over", "info")]
    assert bench.lanes["router"].heartbeats[-1].missed == {1: 3}


def test_a_gap_in_a_routers_lane_ends_no_stream():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), opens=[opened(1)]))
    bench.handle(Gap(5, 1), Hello("router", "router"), KeepAlive("engine", 1))
    assert bench.texts() == {(1, 0): ("a", None)}


def test_rows_whose_open_was_lost_are_reported_once_to_every_router():
    bench = Bench()
    bench.handle(Hello("one", "router"), Hello("two", "router-2"), batch(opens=[opened(9, router="router-3")]))
    bench.handle(batch(row(1, 5, [1])), batch(row(1, 6, [1])))
    bench.handle(batch(row(1, 7, [1], LENGTH)))
    for address in ("router", "router-2"):
        assert bench.texts(address) == {(1, 0): ("", ErrorCode.ROWS_LOST)}
    assert bench.texts("router-3") == {}
    assert (bench.service.decode_loop.unknown_rows, bench.remembered) == (1, 0)


def test_streams_to_a_replaced_router_end():
    bench = Bench()
    bench.handle(Hello("r", "router", epoch=1), batch(row(1, 0, [0]), opens=[opened(1), opened(2, router="other")]))
    bench.handle(Hello("r", "router", epoch=1))
    assert bench.service.streams == 2
    bench.handle(Hello("r", "router", epoch=2), batch(row(1, 1, [1]), row(3, 0, [2]), opens=[opened(3)]))
    assert bench.texts() == {(1, 0): ("a", ErrorCode.ROWS_LOST), (3, 0): ("c", None)}
    bench.handle(Hello("r", "router", epoch=1), Hello("r", "router", epoch=2))
    assert (bench.service.streams, bench.remembered) == (2, 1)
    bench.handle(batch(row(1, 2, [], LENGTH), row(2, 0, [3], LENGTH), row(3, 1, [3], LENGTH)))
    assert (bench.service.streams, bench.remembered, bench.service.decode_loop.unknown_rows) == (0, 0, 0)


def test_streams_of_a_silent_engine_end():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), opens=[opened(1)]), batch(row(2, 0, [0]), opens=[opened(2)], engine="other"))
    bench.handle(batch(row(3, 0, [1]), opens=[opened(3, stop=("b",))]))
    for _ in range(int(ENGINE_SILENCE_SECONDS) + 1):
        bench.handle(Hello("r", "router"), KeepAlive("other", 1))
        bench.heartbeat(1.0)
    assert bench.texts() == {
        (1, 0): ("a", ErrorCode.ENGINE_LOST),
        (2, 0): ("a", None),
        (3, 0): ("", FinishReason.STOP_STRING),
    }
    assert (bench.service.streams, bench.remembered) == (1, 0)


def test_streams_of_a_silent_router_are_freed():
    bench = Bench()
    bench.handle(Hello("r", "router"), batch(row(1, 0, [0]), row(2, 0, [0]), opens=[opened(1), opened(2, router="x")]))
    silent_lane, live_lane = bench.lanes["x"], bench.lanes["router"]
    silent_lane.room = 0
    for _ in range(int(ROUTER_SILENCE_SECONDS) + 1):
        bench.handle(Hello("r", "router"), KeepAlive("engine", 1))
        bench.heartbeat(1.0)
    assert (silent_lane.closed, live_lane.closed, bench.service.streams) == (True, False, 1)
    bench.handle(batch(row(1, 1, [1], LENGTH), row(2, 1, [1], LENGTH)))
    assert bench.texts() == {(1, 0): ("ab", FinishReason.LENGTH)}
    assert (bench.service.waiting, bench.remembered) == (0, 0)


def test_a_router_that_returns_gets_a_report_of_lost_rows():
    bench = Bench()
    hellos = [Hello("r", "router"), Hello("x", "other")]
    bench.handle(*hellos, KeepAlive("one", 11), batch(row(1, 0, [0]), opens=[opened(1, router="other")], epoch=22))
    bench.heartbeat()
    for times in (1, 2):
        for _ in range(int(ROUTER_SILENCE_SECONDS) + 1):
            bench.handle(Hello("r", "router"), KeepAlive("one", 11))
            bench.heartbeat(1.0)
        assert bench.service.streams == 0
        bench.handle(*hellos)
        bench.heartbeat()
        assert bench.lanes["other"].heartbeats[-1].missed == {11: times, 22: times}
    bench.handle(Gap(3, 4), KeepAlive("one", 11))
    bench.heartbeat()
    assert bench.lanes["other"].heartbeats[-1].missed == {11: 6, 22: 2}
    assert [heartbeat.missed for heartbeat in bench.lanes["router"].heartbeats] == [{}] * 65 + [{11: 4}]
