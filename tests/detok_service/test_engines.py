from structlog.testing import capture_logs

from detok_service.engines import MAX_ENGINES, MAX_MISSED, Engines
from sluice.host.limited_log import MAX_LINES
from sluice.lanes.inbox import Gap
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.heartbeats import Hello, KeepAlive
from sluice.wire.timing import DOUBTFUL_ENGINE_SILENCE_SECONDS, ENGINE_SILENCE_SECONDS
from tests.detok_service.bench import LENGTH, Bench, batch, opened, row


def test_heartbeats_report_lost_frames_by_engine_epoch():
    bench = Bench()
    bench.handle(Hello("r", "router"), KeepAlive("one", 11), KeepAlive("two", 22))
    bench.heartbeat()
    bench.handle(Gap(5, 2), KeepAlive("one", 11), Gap(6, 1), Hello("r", "router"), Gap(5, 3), KeepAlive("one", 11))
    bench.heartbeat()
    bench.handle(Gap(8, 1 << 63), KeepAlive("two", 22), Gap(8, 1 << 63), KeepAlive("two", 22))
    bench.heartbeat()
    assert [heartbeat.missed for heartbeat in bench.lanes["router"].heartbeats] == [
        {},
        {11: 5},
        {11: 5, 22: MAX_MISSED},
    ]


def test_a_peer_that_takes_the_name_of_an_engine_does_not_end_its_streams():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), opens=[opened(1)]))
    with capture_logs() as logs:
        for epoch in range(2, 2 + MAX_ENGINES + 10):
            bench.handle(KeepAlive("engine", epoch))
    bench.handle(batch(row(1, 1, [1], LENGTH)))
    assert bench.texts() == {(1, 0): ("ab", FinishReason.LENGTH)}
    assert 0 < len(logs) <= MAX_LINES
    assert logs[0]["event"] == "engine_restarted"


def test_late_frames_of_an_old_epoch_do_not_affect_the_new_one():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), opens=[opened(1)]))
    bench.handle(batch(row(2, 0, [0]), opens=[opened(2)], epoch=2))
    bench.handle(batch(row(1, 1, [1], LENGTH)), KeepAlive("engine", 1), batch(row(2, 1, [1], LENGTH), epoch=2))
    assert bench.texts() == {(1, 0): ("ab", FinishReason.LENGTH), (2, 0): ("ab", FinishReason.LENGTH)}
    assert (bench.service.streams, bench.remembered) == (0, 0)


def test_the_state_of_an_old_epoch_is_dropped_soon():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), opens=[opened(1), opened(2)]), KeepAlive("engine", 2))
    bench.handle(batch(opens=[opened(3)]), batch(row(4, 0, [0]), opens=[opened(4)], epoch=2))
    assert bench.service.streams == 4
    for _ in range(int(DOUBTFUL_ENGINE_SILENCE_SECONDS) + 1):
        bench.handle(Hello("r", "router"))
        bench.heartbeat(1.0)
    assert (bench.service.streams, bench.remembered) == (1, 0)
    assert bench.texts()[3, 0] == ("", ErrorCode.ENGINE_LOST)


def test_streams_of_a_silent_engine_are_dropped_sooner_after_frames_of_a_router_were_lost():
    """A Drop of these streams may have been among the lost frames."""
    bench = Bench()
    bench.handle(Hello("r", "router"), batch(opens=[opened(1)]), batch(opens=[opened(2)], engine="other"))
    bench.handle(Gap(5, 1), Hello("r", "router"))
    for _ in range(int(DOUBTFUL_ENGINE_SILENCE_SECONDS) + 1):
        bench.handle(Hello("r", "router"), KeepAlive("other", 1))
        bench.heartbeat(1.0)
    assert bench.texts() == {(1, 0): ("", ErrorCode.ENGINE_LOST)}
    assert bench.service.streams == 1
    for _ in range(int(ENGINE_SILENCE_SECONDS) - 1):
        bench.handle(Hello("r", "router"))
        bench.heartbeat(1.0)
    assert bench.service.streams == 1


def test_the_silence_of_an_idle_engine_logs_no_warning():
    bench = Bench()
    bench.handle(KeepAlive("idle", 1), batch(opens=[opened(1)]))
    with capture_logs() as logs:
        for _ in range(int(ENGINE_SILENCE_SECONDS) + 1):
            bench.handle(Hello("r", "router"))
            bench.heartbeat(1.0)
    levels = {line["engine"]: line["log_level"] for line in logs if line["event"] == "engine_lost"}
    assert levels == {"idle": "info", "engine": "warning"}


def test_the_number_of_known_engines_is_bounded():
    engines = Engines()
    engines.on_frame(("first", 1), 0.0)
    for number in range(MAX_ENGINES):
        assert engines.on_frame((f"engine-{number}", number), 1.0) is None
        engines.count_missed((f"engine-{number}", number), 1)
        engines.on_frame(("kept", 1 << 40), 1.0)
    assert len(engines.missed) < MAX_ENGINES
    assert engines.on_frame(("kept", 1 << 41), 2.0) == ("kept", 1 << 40)
    assert engines.on_frame(("first", 2), 2.0) is None
    for engine in engines.silent(2.0 + ENGINE_SILENCE_SECONDS):
        engines.forget(engine)
    assert (engines.missed, engines.silent(1e9)) == ({}, [("kept", 1 << 41), ("first", 2)])
