"""A request that kills every engine that computes it, among other requests on a real ring."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from sluice import AsyncClient
from sluice.client import Poison
from sluice.launch import Ring

NEIGHBOURS = 8
TOKENS = 300
LIMIT = 240
SCHEDULER = """
import os
from pathlib import Path

from engine_worker.scheduling.max_utilization import MaxUtilization


class Mortal(MaxUtilization):
    def schedule_request(self, active):
        for sequence in active:
            name, _, position = sequence.request.submit.name.partition("-")
            if name == "poison" and len(sequence.output) >= int(position):
                requests = {each.request.submit.request for each in active}
                with Path(__file__).with_name("deaths").open("a") as deaths:
                    deaths.write(f"{len(requests)}\\n")
                os._exit(1)
        return super().schedule_request(active)
"""


@dataclass
class Received:
    """The text of a concurrent stream, and the times of its chunks."""

    text: str = ""
    at: list[float] = field(default_factory=list)

    @property
    def longest_pause(self) -> float:
        return max((after - before for before, after in zip(self.at, self.at[1:], strict=False)), default=0.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mortal.py").write_text(SCHEDULER)
    (tmp_path / "engine.yaml").write_text("capacity_scheduler_policy: mortal:Mortal\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def stream_neighbour(client, i, begun=lambda: None) -> Received:
    received = Received()
    async for chunk in client.stream(f"# {i}\ndef f(x):\n", seed=i, max_tokens=TOKENS, ignore_eos=True):
        received.text += chunk.text
        received.at.append(time.monotonic())
        if len(received.at) == 5:
            begun()
    return received


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("position", "max_deaths", "streaming"),
    [
        (0, 2, True),
        pytest.param(20, 3, True, marks=pytest.mark.long),
        pytest.param(20, 3, False, marks=pytest.mark.long),
    ],
)
async def test_poison_ends_with_an_error_and_affects_no_other_stream(folder, position, max_deaths, streaming):
    args = {"config": folder / "engine.yaml"}
    with Ring(engines=2, routers=2, detokenizers=2, engine_args=args) as ring:
        async with AsyncClient(ring.addresses, timeout=LIMIT) as client:
            undisturbed = await asyncio.gather(*(stream_neighbour(client, i) for i in range(2)))
            begun = asyncio.Semaphore(0)
            neighbours = [asyncio.create_task(stream_neighbour(client, i, begun.release)) for i in range(NEIGHBOURS)]
            for _ in neighbours:
                await begun.acquire()
            with pytest.raises(Poison) as caught:
                await generate(client, f"poison-{position}", streaming)
            received = await asyncio.gather(*neighbours)
    assert [stream.text for stream in received[:2]] == [stream.text for stream in undisturbed]
    assert caught.value.reason == "POISON"
    deaths = [int(line) for line in (folder / "deaths").read_text().split()]
    print(f"requests at each death: {deaths}, longest pause: {max(stream.longest_pause for stream in received):.1f} s")
    assert 2 <= len(deaths) <= max_deaths
    assert deaths[-1] == 1


async def generate(client, name, streaming):
    options = {"request_id": name, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    if streaming:
        async for _ in client.stream("def g(x):\n", **options):
            pass
    else:
        await client.generate("def g(x):\n", **options)
