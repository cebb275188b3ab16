"""Every service is restarted in turn while streams run: streams that do not end while it drains continue elsewhere.

The streams use LoRA and prompt adapters, prompt tables, a draft model or images.
"""

import asyncio

import pytest

from bench.deaths import adapters, images, qwen_vl, streams
from bench.deaths.kills import WITH_ADAPTERS, WITH_IMAGES, WITH_QWEN_VL
from bench.deaths.requests import StreamRequest
from bench.deaths.restart import restart_all
from sluice.launch import Ring

DRAIN_SECONDS = 3.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def check_streams_survive_restarts(ring: Ring, requests: list[StreamRequest]) -> None:
    counter = streams.StreamCounter()

    async def run() -> list[str]:
        async with streams.connect(ring.addresses) as client:
            quiet = await streams.undisturbed(client, requests, lambda: None)
            restarting = asyncio.create_task(restart_all(ring, lambda _: None))
            await streams.without_pause(client, requests, quiet, restarting, counter.add)
            return [restart.ending for restart in await restarting]

    assert set(asyncio.run(run())) == {"ended with code 0"}
    totals = counter.totals()
    print(totals["streams"], "streams", totals["resumed"], "resumed")
    assert totals["streams"] >= len(requests)
    assert (totals["failed"], totals["wrong"], totals["repeated"], totals["faults"]) == (0, 0, 0, [])


def test_streams_with_adapters(tmp_path):
    adapters.write_adapters(tmp_path)
    with adapters.ring(WITH_ADAPTERS, tmp_path, drain_timeout=DRAIN_SECONDS) as ring:
        check_streams_survive_restarts(ring, adapters.requests(WITH_ADAPTERS, tmp_path))


def test_streams_with_images(tmp_path):
    model = images.write_model(tmp_path / "llava")
    with WITH_IMAGES.ring({}, model=model, drain_timeout=DRAIN_SECONDS) as ring:
        check_streams_survive_restarts(ring, images.requests(WITH_IMAGES))


def test_streams_with_images_of_any_size(tmp_path):
    model = qwen_vl.write_model(tmp_path / "qwen_vl")
    # The streams are short.
    with WITH_QWEN_VL.ring({}, model=model, drain_timeout=0.5) as ring:
        check_streams_survive_restarts(ring, qwen_vl.requests(WITH_QWEN_VL))
