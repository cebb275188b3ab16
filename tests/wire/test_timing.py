"""The inequalities between intervals of different services."""

import pytest

from sluice.launch.plan import Plan
from sluice.settings.services import DetokenizerSettings, EngineSettings, RouterSettings, ServiceSettings
from sluice.telemetry.service_status import TOUCH_SECONDS
from sluice.wire.timing import (
    CACHE_REPORT_SECONDS,
    CUT_OFF_FORGET_SECONDS,
    CUT_OFF_SECONDS,
    DEATH_SECONDS,
    DOUBTFUL_ENGINE_SILENCE_SECONDS,
    DRAIN_NOTICE_SECONDS,
    DRAINING_ROUTER_SILENCE_SECONDS,
    ENGINE_SILENCE_SECONDS,
    HEARTBEAT_SECONDS,
    HELLO_SECONDS,
    HUNG_UP_SECONDS,
    KEEP_ALIVE_SECONDS,
    LANE_FORGET_SECONDS,
    RECONNECT_SECONDS,
    ROUTER_SILENCE_SECONDS,
    WATCH_SECONDS,
)


def default(settings: type[ServiceSettings], name: str) -> float:
    return getattr(settings, name)


def test_a_silence_spans_several_intervals():
    # One lost or late message must not look like a death.
    assert default(RouterSettings, "peer_timeout") >= 4 * HEARTBEAT_SECONDS
    assert ROUTER_SILENCE_SECONDS >= 4 * HELLO_SECONDS
    assert DRAINING_ROUTER_SILENCE_SECONDS >= 4 * HELLO_SECONDS
    assert DOUBTFUL_ENGINE_SILENCE_SECONDS >= 4 * KEEP_ALIVE_SECONDS
    assert CUT_OFF_SECONDS >= 4 * KEEP_ALIVE_SECONDS
    assert Plan(model="m", name="n").freeze_timeout >= 4 * TOUCH_SECONDS


def test_an_ended_connection_shortens_the_timeout():
    assert 2 * HEARTBEAT_SECONDS <= HUNG_UP_SECONDS < default(RouterSettings, "peer_timeout")


def test_a_death_is_detected_sooner_than_a_missed_heartbeat():
    # The first attempt to reconnect and the check after it. The rest is a margin for busy machines.
    assert 2 * (RECONNECT_SECONDS + WATCH_SECONDS) <= DEATH_SECONDS < HEARTBEAT_SECONDS


def test_a_router_recovers_its_streams_before_peers_end_them():
    # An engine or detokenizer that loses its router for a moment must still know it when it returns.
    assert default(RouterSettings, "peer_timeout") + HELLO_SECONDS < ROUTER_SILENCE_SECONDS
    # Rows may be dropped only after the router has moved their streams to another lane.
    assert LANE_FORGET_SECONDS > CUT_OFF_SECONDS + KEEP_ALIVE_SECONDS + HEARTBEAT_SECONDS
    assert default(RouterSettings, "recovery_timeout") > CUT_OFF_SECONDS + KEEP_ALIVE_SECONDS + HEARTBEAT_SECONDS


def test_a_lane_that_is_cut_off_outlives_one_that_is_idle():
    # Otherwise routers would place requests behind it again before it is known to work.
    assert CUT_OFF_FORGET_SECONDS > LANE_FORGET_SECONDS


def test_a_detokenizer_waits_longer_for_an_engine_than_a_step_may_take():
    # The step loop sends keep-alives. A frozen engine is restarted before a detokenizer considers it lost.
    assert default(EngineSettings, "rank_timeout") < ENGINE_SILENCE_SECONDS
    assert default(EngineSettings, "live_stall") < ENGINE_SILENCE_SECONDS
    assert Plan(model="m", name="n").freeze_timeout < ENGINE_SILENCE_SECONDS
    assert default(RouterSettings, "stall_timeout") < ENGINE_SILENCE_SECONDS
    assert DOUBTFUL_ENGINE_SILENCE_SECONDS < ENGINE_SILENCE_SECONDS


@pytest.mark.parametrize("settings", [EngineSettings, DetokenizerSettings])
def test_a_drain_is_detected_before_it_times_out(settings):
    assert 2 * HEARTBEAT_SECONDS <= DRAIN_NOTICE_SECONDS < default(settings, "drain_timeout")
    # A router that has died does not delay a drain until its timeout.
    assert default(settings, "drain_timeout") > DRAINING_ROUTER_SILENCE_SECONDS


def test_blocks_are_reported_within_a_hello_and_a_few_heartbeats():
    # The hello contains what the router knows, the next heartbeat the changes. Both may be lost once.
    assert CACHE_REPORT_SECONDS >= 2 * (HELLO_SECONDS + HEARTBEAT_SECONDS)
