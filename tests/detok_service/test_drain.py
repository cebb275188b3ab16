"""When a draining detokenizer may exit."""

from structlog.testing import capture_logs

from sluice.wire.errors import FinishReason
from sluice.wire.heartbeats import Hello, KeepAlive
from sluice.wire.requests import Drop
from sluice.wire.timing import DRAIN_NOTICE_SECONDS, DRAINING_ROUTER_SILENCE_SECONDS, ENGINE_SILENCE_SECONDS
from tests.detok_service.bench import LENGTH, Bench, batch, opened, row

TIMEOUT = 10.0


class Draining(Bench):
    """Checks continually whether the drain is complete."""

    def keeps_running(self, seconds, step=0.05, *messages):
        end = self.now + seconds
        while self.now < end:
            self.handle(*messages)
            self.service.tick()
            if self.service.drained(TIMEOUT):
                return False
            self.now += step
        return True


def test_a_detokenizer_without_routers_exits_immediately():
    bench = Draining()
    assert not bench.service.drained(0.0)
    bench.service.drain()
    assert not bench.keeps_running(0.1)


def test_it_waits_until_routers_know_of_the_drain():
    bench = Draining()
    bench.handle(Hello("r", "router"))
    bench.heartbeat()
    bench.service.drain()
    bench.handle()
    bench.service.tick()
    assert bench.lanes["router"].heartbeats[-1].draining, "routers are notified before the process exits"
    assert bench.keeps_running(DRAIN_NOTICE_SECONDS - 0.01)
    assert not bench.keeps_running(0.2)


def test_a_router_with_a_full_lane_does_not_count_as_notified():
    bench = Draining()
    bench.handle(Hello("r", "router"), Hello("s", "slow"))
    bench.lanes["slow"].room = 0
    bench.service.drain()
    assert bench.keeps_running(3.0, 0.05, Hello("r", "router"), Hello("s", "slow"))
    bench.lanes["slow"].room = 1 << 60
    assert bench.keeps_running(DRAIN_NOTICE_SECONDS)
    assert not bench.keeps_running(1.0)


def test_new_streams_are_served_while_draining_and_moved_ones_are_not_waited_for():
    bench = Draining()
    bench.handle(Hello("r", "router"), batch(row(1, 0, [0]), opens=[opened(1)]))
    bench.service.drain()
    bench.handle(batch(row(1, 1, [1]), row(2, 0, [2]), row(3, 0, [0]), opens=[opened(2), opened(3)]))
    assert bench.keeps_running(1.5, 0.05, Hello("r", "router"))
    bench.handle(batch(row(1, 2, [2], LENGTH)))
    assert bench.keeps_running(0.5)
    bench.handle(batch(row(2, 1, [3], LENGTH)), Drop(3, 1))
    assert not bench.keeps_running(0.1)
    assert bench.texts() == {
        (1, 0): ("abc", FinishReason.LENGTH),
        (2, 0): ("cd", FinishReason.LENGTH),
        (3, 0): ("a", None),
    }


def test_rows_behind_a_full_lane_are_waited_for():
    bench = Draining()
    bench.handle(Hello("r", "router"), batch(opens=[opened(1)]))
    bench.service.drain()
    bench.service.tick()
    lane = bench.lanes["router"]
    lane.room = 0
    bench.handle(batch(row(1, 0, [0], LENGTH)))
    assert bench.keeps_running(2.0)
    lane.room = 1 << 60
    assert not bench.keeps_running(0.1)
    assert bench.texts() == {(1, 0): ("a", FinishReason.LENGTH)}


def test_a_dead_router_does_not_delay_the_exit():
    bench = Draining()
    bench.handle(Hello("r", "router"), Hello("d", "dead"), batch(opens=[opened(1, router="dead")]))
    bench.lanes["dead"].room = 0
    bench.service.drain()
    assert bench.keeps_running(DRAINING_ROUTER_SILENCE_SECONDS, 0.05, Hello("r", "router"), KeepAlive("engine", 1))
    with capture_logs() as logs:
        assert not bench.keeps_running(1.0)
    assert [(line["event"], line["log_level"]) for line in logs if line["event"] == "router_lost"] == [
        ("router_lost", "warning")
    ]


def test_a_router_that_has_ended_does_not_delay_the_exit_until_it_counts_as_silent():
    bench = Draining()
    bench.handle(Hello("r", "router"))
    lane = bench.lanes["router"]
    lane.room, lane.refused_at = 0, bench.now
    bench.heartbeat()
    assert not lane.closed, "the router may be restarted and would then need its rows"
    bench.service.drain()
    with capture_logs() as logs:
        assert not bench.keeps_running(0.1)
    assert [line["reason"] for line in logs if line["event"] == "router_lost"] == ["ended"]


def test_a_pause_of_the_process_does_not_count_as_silence_of_routers():
    bench = Draining()
    bench.handle(Hello("r", "router"), batch(row(1, 0, [0]), opens=[opened(1)]))
    bench.service.drain()
    bench.service.tick()
    bench.now += 2 * ENGINE_SILENCE_SECONDS
    # The process continues before ZeroMQ's thread has read the messages that arrived in the meantime.
    bench.service.tick()
    bench.handle(Hello("r", "router"), batch(row(1, 1, [1], LENGTH)))
    assert bench.texts() == {(1, 0): ("ab", FinishReason.LENGTH)}
    assert bench.service.decode_loop.unknown_rows == 0


def test_no_warning_for_a_lost_router_without_streams_while_the_ring_stops():
    bench = Draining()
    bench.handle(Hello("r", "router"))
    bench.lanes["router"].room = 0
    bench.service.drain()
    with capture_logs() as logs:
        assert not bench.keeps_running(DRAINING_ROUTER_SILENCE_SECONDS + 1.0)
    assert [line["log_level"] for line in logs if line["event"] == "router_lost"] == ["info"]


def test_it_exits_after_the_timeout_in_any_case():
    bench = Draining()
    bench.handle(Hello("r", "router"), batch(opens=[opened(1)]))
    bench.service.drain()
    assert bench.keeps_running(TIMEOUT - 0.1, 0.05, Hello("r", "router"))
    assert not bench.keeps_running(0.2, 0.05, Hello("r", "router"))
