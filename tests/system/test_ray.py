"""A ring on a Ray cluster of this machine: each actor is killed in turn, streams go on unchanged, nothing is left.

    SLUICE_TEST_RAY=1 python -m pytest tests/system/test_ray.py

It takes some minutes, so it is no part of `make test`.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from sluice import AsyncClient
from sluice.launch import LogLine, OptionsError, Ring
from tests.fakes.processes import is_alive, wait_until

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'sluice[ray]'")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif("SLUICE_TEST_RAY" not in os.environ, reason="takes minutes: set SLUICE_TEST_RAY=1"),
]

ATTEMPTS = 3
CPUS = 8
OBJECT_STORE_BYTES = 80_000_000
PATIENCE = 120.0
"""Seconds until a killed actor serves again: Ray starts a process for it, and that one the service."""
PROMPT = "def fibonacci(n):\n"
SPECS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "seed": 2, "n": 2}]
NAMES = ["engine-0", "engine-1", "detok-0", "detok-1", "router-0", "router-1"]
TOKENS, ENOUGH = 200, 20
OPTIONS = {
    "on": "ray",
    "host": "0.0.0.0",
    "router_args": {"insecure": True},
    "engine_args": {"device": "cpu", "threads": 1},
    "start_timeout": 300.0,
}


@pytest.fixture(scope="module")
def cluster():
    """A raylet gives up if its agents are late, as they are on busy cores: it is tried again, then skipped."""
    failure = ""
    for _ in range(ATTEMPTS):
        try:
            ray.init(
                address="local",
                num_cpus=CPUS,
                include_dashboard=False,
                log_to_driver=False,
                namespace="sluice",
                object_store_memory=OBJECT_STORE_BYTES,
            )
            break
        except Exception as error:  # noqa: BLE001 - whatever keeps Ray from coming up
            failure = f"{type(error).__name__}: {error}"
            ray.shutdown()
    else:
        pytest.skip(f"ray did not come up in {ATTEMPTS} attempts: {failure[:300]}")
    yield
    ray.shutdown()


class Events(list[tuple[str, str]]):
    """The launcher's own lines, as (service, event)."""

    def __call__(self, line: LogLine) -> None:
        if line.fields.get("service") == "launcher":
            self.append((line.child, str(line.event)))


def parent(pid: int) -> int:
    """Of a service: its actor's process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def keys(pid: int) -> Path:
    """Of a service: the folder of its keys."""
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return Path(command[command.index("--keys") + 1])


async def follow(client: AsyncClient, spec: dict, half_way: asyncio.Semaphore) -> dict[int, tuple[str, list[int]]]:
    """Text and tokens of each output; every offset must come once, in order."""
    found: dict[int, tuple[str, list[int]]] = {}
    async for chunk in client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True, token_ids=True, **spec):
        text, tokens = found.get(chunk.index, ("", []))
        if chunk.token_ids:
            assert chunk.token_offset == len(tokens)
        found[chunk.index] = (text + chunk.text, [*tokens, *chunk.token_ids])
        if len(found[chunk.index][1]) > ENOUGH:
            half_way.release()
    return found


async def kill_under_streams(ring: Ring, name: str, undisturbed: list) -> None:
    async with AsyncClient(ring.addresses, timeout=PATIENCE) as client:
        half_way = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(follow(client, spec, half_way)) for spec in SPECS]
        for _ in SPECS:
            await half_way.acquire()
        os.kill(parent(ring.pids[name]), signal.SIGKILL)
        assert await asyncio.gather(*streams) == undisturbed


def test_streams_outlive_each_actor(cluster) -> None:
    events, secrets = Events(), set[Path]()
    with Ring(engines=2, detokenizers=2, routers=2, observe=events, **OPTIONS) as ring:
        assert sorted(ring.pids) == sorted(NAMES)
        undisturbed = asyncio.run(undisturbed_streams(ring))
        for name in NAMES:
            actor = parent(ring.pids[name])
            events.clear()
            secrets.add(keys(ring.pids[name]))
            asyncio.run(kill_under_streams(ring, name, undisturbed))
            assert wait_until(lambda name=name: (name, "service_recovered") in events, PATIENCE), (name, events)
            assert events == [(name, "service_exited"), (name, "service_recovered")]
            assert parent(ring.pids[name]) != actor
            assert not is_alive(actor)
        pids = list(ring.pids.values())
        secrets |= set(map(keys, pids))
        assert len(secrets) == 2 * len(NAMES)
        processes = pids + [parent(pid) for pid in pids]
    assert wait_until(lambda: not any(map(is_alive, processes)))
    assert wait_until(lambda: not any(each.exists() for each in secrets))


async def undisturbed_streams(ring: Ring) -> list:
    async with AsyncClient(ring.addresses, timeout=PATIENCE) as client:
        return await asyncio.gather(*(follow(client, spec, asyncio.Semaphore(0)) for spec in SPECS))


def test_an_interface_that_no_other_machine_reaches_is_refused() -> None:
    with pytest.raises(OptionsError, match=r"host 127\.0\.0\.1: on Ray, routers listen on other machines"):
        Ring(on="ray")
