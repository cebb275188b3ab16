"""What a router says of its peers and requests at a moment."""

from router.requests.overview import MAX_LISTED
from tests.fakes.ring_scripts import hang
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


async def test_the_open_requests_come_first_and_the_newest_of_each(client, ring):
    overview = client.router.ring.overview
    for name in ("a", "b"):
        await client.generate(text_spec(request_id=name))
    ring.script = hang
    calls = [client.stream(text_spec(request_id=name)) for name in ("c", "d")]
    await client.until(lambda: len(ring.calls) == 4)
    found = overview.latest_requests()
    assert [each.id for each in found if not each.open] == ["b", "a"]
    assert {each.id for each in found[:2]} == {"c", "d"}
    assert [each.state for each in found] == ["ON_RING", "ON_RING", "LENGTH", "LENGTH"]
    assert [(each.tenant, each.open, each.admitted) for each in overview.tenants()] == [("", 2, 2)]
    for call in calls:
        call.cancel()
    await client.until(lambda: not client.router.ring.requests.open)
    assert overview.tenants() == []
    assert {each.state for each in overview.latest_requests()[:2]} == {"CANCELLED"}


async def test_only_so_many_are_listed(client):
    for _ in range(MAX_LISTED + 3):
        await client.generate(text_spec())
    assert len(client.router.ring.overview.latest_requests()) == MAX_LISTED
