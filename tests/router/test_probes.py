"""/livez and /readyz of a router."""

import asyncio
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from sluice.v1 import admin_pb2
from tests.fakes.ports import free_ports

OK = (200, "ok\n")


@pytest.fixture
def port() -> int:
    return free_ports(1)


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def probe(port: int, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(fetch, port, path)


async def until_probe_is(answer: tuple[int, str], port: int, path: str) -> None:
    async with asyncio.timeout(60):
        while await probe(port, path) != answer:
            await asyncio.sleep(0.02)


async def test_a_router_is_ready_while_both_kinds_of_peers_accept_work(ring, start, port):
    client = await start(
        wait=False,
        engines=(f"ipc://{ring.folder}/engine",),
        detokenizers=(f"ipc://{ring.folder}/detok",),
        metrics_port=port,
        peer_timeout=1.0,
        ready_grace=0.0,
    )
    assert await probe(port, "/livez") == OK
    assert await probe(port, "/readyz") == (503, "no engine and no detokenizer accepts work\n")
    engine = ring.add_engine("engine")
    await client.until(lambda: client.router.ring.membership.engines.usable)
    assert await probe(port, "/readyz") == (503, "no detokenizer accepts work\n")
    ring.add_detokenizer("detok")
    await client.until_serving()
    assert await probe(port, "/readyz") == OK
    engine.beating = False
    await client.until(lambda: not client.router.ring.membership.engines.usable)
    assert await probe(port, "/readyz") == (503, "no engine accepts work\n")
    engine.beating = True
    await client.until_serving()
    await client.admin.Drain(admin_pb2.DrainRequest())
    assert await probe(port, "/readyz") == (503, "it is draining\n")
    assert await probe(port, "/livez") == OK


@pytest.mark.slow
async def test_a_blocked_event_loop_is_reported_by_another_thread(ring, start, port):
    ring.add_engine()
    ring.add_detokenizer()
    await start(metrics_port=port, ready_stall=1.0, live_stall=2.0)
    for path in ("/readyz", "/livez"):
        await until_probe_is(OK, port, path)

    def fetch_later(path: str) -> tuple[int, str]:
        time.sleep(3)
        return fetch(port, path)

    with ThreadPoolExecutor(2) as threads:
        # Leaving the block waits for the responses and thus blocks the event loop.
        probes = [threads.submit(fetch_later, path) for path in ("/readyz", "/livez")]
    (ready, why), (live, _) = [future.result() for future in probes]
    assert (ready, live) == (503, 503)
    assert why.startswith("the loop has not run for ")
    for path in ("/readyz", "/livez"):
        await until_probe_is(OK, port, path)
