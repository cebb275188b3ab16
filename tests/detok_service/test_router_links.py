"""The number of lanes to routers is bounded."""

import structlog

from detok_service.router_links import RouterLinks
from tests.fakes.lanes import FakeLane


def test_a_router_beyond_the_limit_gets_no_lane_until_another_is_removed(monkeypatch):
    monkeypatch.setattr("detok_service.router_links.MAX_LINKS", 2)
    links = RouterLinks(lambda _: FakeLane(), ("detok", 1), structlog.get_logger())
    links_by_call = [links.link_to(address, 0.0) for address in ("a", "b", "c", "a")]
    assert [link is not None for link in links_by_call] == [True, True, False, True]
    assert links_by_call[0] is links_by_call[3]
    links.remove("a", ())
    assert links.link_to("c", 0.0) is not None
