"""The router's snapshot of its peers and requests."""

from router.requests.overview import MAX_LISTED
from tests.fakes.ring_scripts import TIMES, hang
from tests.router.conftest import text_spec


def states(reports) -> dict[str, str]:
    return {report.id: report.state for report in reports}


async def test_peers(ring, start):
    engine = ring.add_engine("a")
    ring.add_engine("b")
    ring.add_detokenizer("d")
    absent = f"ipc://{ring.folder}/absent"
    client = await start(wait=False, engines=(*ring.engines, absent), peer_timeout=0.3)
    overview = client.router.ring.overview
    await client.until(lambda: sorted(states(overview.engines()).values()) == ["serving", "serving", "unknown"])
    assert states(overview.engines())[absent] == "unknown"
    engine.draining = True
    await client.until(lambda: states(overview.engines())["a"] == "draining")
    engine.beating = False
    await client.until(lambda: states(overview.engines())["a"] == "lost")
    (lost,) = (report for report in overview.engines() if report.id == "a")
    assert lost.heartbeat_age > 0.3
    assert states(overview.detokenizers()) == {"d": "serving"}


async def test_open_requests_come_first_newest_first(client, ring):
    overview = client.router.ring.overview
    for name in ("a", "b"):
        await client.generate(text_spec(request_id=name))
    ring.script = hang
    calls = [client.stream(text_spec(request_id=name)) for name in ("c", "d")]
    await client.until(lambda: len(ring.calls) == 4)
    latest = overview.latest_requests()
    assert [entry.id for entry in latest if not entry.open] == ["b", "a"]
    assert {entry.id for entry in latest[:2]} == {"c", "d"}
    assert [entry.state for entry in latest] == ["ON_RING", "ON_RING", "LENGTH", "LENGTH"]
    firsts = [entry.first_token_seconds for entry in latest]
    assert firsts[:2] == [None, None]
    assert all(first >= TIMES.queue + TIMES.context for first in firsts[2:])
    assert [(entry.tenant, entry.open, entry.admitted) for entry in overview.tenants()] == [("", 2, 2)]
    for call in calls:
        call.cancel()
    await client.until(lambda: not client.router.ring.requests.open)
    assert overview.tenants() == []
    assert {entry.state for entry in overview.latest_requests()[:2]} == {"CANCELLED"}


async def test_the_number_of_listed_requests_is_bounded(client):
    for _ in range(MAX_LISTED + 3):
        await client.generate(text_spec())
    assert len(client.router.ring.overview.latest_requests()) == MAX_LISTED
