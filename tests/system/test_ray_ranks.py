"""An engine whose ranks are on two nodes of a Ray cluster: it restarts as a whole, and streams go on unchanged.

    SLUICE_TEST_RAY=1 python -m pytest tests/system/test_ray_ranks.py

The nodes are raylets of this machine that claim a GPU each. torch finds none, so the ranks compute on the CPU.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice import AsyncClient
from sluice.launch import Ring
from tests.fakes.processes import is_alive, wait_until
from tests.system.ray_streams import (
    ATTEMPTS,
    OBJECT_STORE_BYTES,
    PATIENCE,
    SPECS,
    Events,
    follow,
    parent,
    undisturbed_streams,
)

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'sluice-serve[ray]'")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif("SLUICE_TEST_RAY" not in os.environ, reason="takes minutes: set SLUICE_TEST_RAY=1"),
]

RANKS = 2
GPU_NODES = RANKS + 1
"""One to spare, for the ranks of a node that is lost."""
HEAD = {"num_cpus": 4, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
OPTIONS = {
    "on": "ray",
    "host": "0.0.0.0",
    "detokenizers": 1,
    "router_args": {"insecure": True},
    "engine_args": {"tensor_parallel": RANKS, "threads": 1},
    "start_timeout": 300.0,
}


@pytest.fixture
def cluster() -> Iterator[object]:
    """If a raylet gives up, it is tried again, then skipped."""
    from ray.cluster_utils import Cluster

    failure = ""
    for _ in range(ATTEMPTS):
        found = Cluster()
        try:
            found.add_node(**HEAD)
            for _ in range(GPU_NODES):
                found.add_node(**NODE)
            ray.init(found.address, log_to_driver=False, namespace="sluice")
            break
        except Exception as error:  # noqa: BLE001 - whatever keeps Ray from coming up
            failure = f"{type(error).__name__}: {error}"
            ray.shutdown()
            found.shutdown()
    else:
        pytest.skip(f"ray did not come up in {ATTEMPTS} attempts: {failure[:300]}")
    yield found
    ray.shutdown()
    found.shutdown()


def variables(pid: int) -> dict[str, str]:
    """Empty for a process of another user, or one that has ended."""
    try:
        found = Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return {}
    return dict(each.split("=", 1) for each in found.split("\0") if "=" in each)


def ranks(ring: Ring) -> list[int]:
    """Their processes, in order."""
    port = variables(ring.pids["engine-0"])["MASTER_PORT"]
    pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    found = {pid: own for pid in pids if (own := variables(pid)).get("MASTER_PORT") == port}
    return sorted(found, key=lambda pid: int(found[pid]["RANK"]))


async def strike_under_streams(ring: Ring, strike: Callable[[], None], undisturbed: list) -> None:
    async with AsyncClient(ring.addresses, timeout=2 * PATIENCE) as client:
        half_way = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(follow(client, spec, half_way)) for spec in SPECS]
        for _ in SPECS:
            await half_way.acquire()
        await asyncio.to_thread(strike)
        assert await asyncio.gather(*streams) == undisturbed


def test_streams_outlive_a_rank_an_actor_and_a_node(cluster) -> None:
    def lose_node(pid: int) -> None:
        """That of a rank: its actor is a child of the raylet."""
        raylet = parent(parent(pid))
        nodes = {each.all_processes["raylet"][0].process.pid: each for each in cluster.worker_nodes}
        cluster.remove_node(nodes[raylet], allow_graceful=False)

    strikes: dict[str, Callable[[], None]] = {
        "rank 1": lambda: os.kill(ranks(ring)[1], signal.SIGKILL),
        "actor of rank 0": lambda: os.kill(parent(ranks(ring)[0]), signal.SIGKILL),
        "node of rank 1": lambda: lose_node(ranks(ring)[1]),
    }
    events = Events()
    with Ring(observe=events, **OPTIONS) as ring:
        places = [variables(pid) for pid in ranks(ring)]
        assert [(each["RANK"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) for each in places] == [
            ("0", "0", "1"),
            ("1", "0", "1"),
        ]
        assert len({parent(parent(pid)) for pid in ranks(ring)}) == RANKS
        undisturbed = asyncio.run(undisturbed_streams(ring))
        for victim, strike in strikes.items():
            before = ranks(ring)
            events.clear()
            asyncio.run(strike_under_streams(ring, strike, undisturbed))
            assert wait_until(lambda: ("engine-0", "service_recovered") in events, PATIENCE), (victim, events)
            assert events.count(("engine-0", "service_exited")) == 1, (victim, events)
            assert wait_until(lambda pids=before: not any(map(is_alive, pids))), victim
            assert len(ranks(ring)) == RANKS
        processes = [*ranks(ring), *map(parent, ranks(ring))]
    assert wait_until(lambda: not any(map(is_alive, processes)))
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())
