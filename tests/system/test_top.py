"""The screen of `sluice top` with a real ring."""

import asyncio

import pytest
from textual.widgets import DataTable

from sluice import Client
from sluice.top.app import TopApp
from sluice.top.snapshot import combine, query


@pytest.fixture
def client(ring):
    with Client(ring.address, tenant="search") as client:
        yield client


async def test_the_screen_shows_services_and_requests(client):
    client.generate(list(range(30)), request_id="seen-by-top", max_tokens=4, ignore_eos=True)
    screen = TopApp(lambda: combine([query(client)]), 0.1)
    async with screen.run_test(size=(160, 50)) as pilot:

        def column(panel: str, at: int = 0) -> list[str]:
            table = screen.query_one(f"#{panel}", DataTable)
            return [str(table.get_row_at(i)[at]) for i in range(table.row_count)]

        async with asyncio.timeout(60):
            while not column("engines"):
                await pilot.pause(0.02)
        assert (column("engines"), column("engines", 1)) == (["engine-0"], ["serving"])
        assert column("engines", 10)[0].startswith("tiny ")
        assert column("detokenizers") == ["detok-0", "detok-1"]
        assert column("routers", 1) == ["serving"]
        row = column("requests").index("seen-by-top")
        assert [column("requests", i)[row] for i in (1, 2, 7)] == ["length", "search", "4"]
