"""The number of lanes to routers is bounded."""

import structlog

from detok_service.router_links import RouterLinks
from sluice.wire.errors import FinishReason
from sluice.wire.heartbeats import Hello, KeepAlive
from tests.detok_service.bench import LENGTH, Bench, batch, opened, row
from tests.fakes.lanes import FakeLane


def test_a_router_beyond_the_limit_gets_no_lane_until_another_is_removed(monkeypatch):
    monkeypatch.setattr("detok_service.router_links.MAX_LINKS", 2)
    links = RouterLinks(lambda _: FakeLane(), ("detok", 1), structlog.get_logger())
    links_by_call = [links.link_to(address, 0.0) for address in ("a", "b", "c", "a")]
    assert [link is not None for link in links_by_call] == [True, True, False, True]
    assert links_by_call[0] is links_by_call[3]
    links.remove("a", ())
    assert links.link_to("c", 0.0) is not None


def test_routers_that_only_streams_name_leave_room_for_those_that_say_hello(monkeypatch):
    """The holder of an engine's key can name any number of routers."""
    monkeypatch.setattr("detok_service.router_links.MAX_UNGREETED", 2)
    links = RouterLinks(lambda _: FakeLane(), ("detok", 1), structlog.get_logger())
    assert [links.link_to(address, 0.0) is not None for address in ("a", "b", "c")] == [True, True, False]
    link = links.link_to("router", 0.0, greeted=True)
    assert link is not None
    link.on_hello(Hello("r", "router", epoch=1), 0.0)
    assert links.link_to("a", 0.0, greeted=True).on_hello(Hello("a", "a", epoch=2), 0.0) is False
    assert links.link_to("c", 0.0) is not None


def test_a_batch_of_text_has_a_limited_number_of_rows(monkeypatch):
    """A router handles a batch in one go. Rows follow the Started of their streams."""
    monkeypatch.setattr("detok_service.router_links.MAX_TEXT_ROWS", 2)
    bench = Bench()
    bench.handle(Hello("r", "router", epoch=1))
    bench.lanes["router"].room = 0
    bench.handle(batch(*(row(i, 0, [0], LENGTH) for i in range(5)), opens=[opened(i) for i in range(5)]))
    bench.lanes["router"].room = 100
    bench.handle(KeepAlive("engine", 1))
    batches = bench.lanes["router"].batches
    assert [(len(each.started), len(each.request)) for each in batches] == [(2, 0), (2, 0), (1, 2), (0, 2), (0, 1)]
    assert bench.texts() == {(i, 0): ("a", FinishReason.LENGTH) for i in range(5)}
