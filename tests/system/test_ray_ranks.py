"""An engine with ranks on two nodes of a Ray cluster: it restarts as a whole, and streams do not change.

    SLUICE_TEST_RAY=1 python -m pytest tests/system/test_ray_ranks.py

The nodes are local raylets that each claim to have a GPU. torch finds none, so the ranks compute on the CPU.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.launch import Ring
from tests.fakes.processes import is_alive, wait_until
from tests.system.ray_streams import (
    ATTEMPTS,
    MARKS,
    OBJECT_STORE_BYTES,
    PATIENCE,
    Events,
    parent,
    streams_over,
    undisturbed_streams,
)

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'sluice-serve[ray]'")

pytestmark = MARKS

RANKS = 2
GPU_NODES = RANKS + 1
"""One node is spare, for the rank of a node that is lost."""
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
    """A cluster of several raylets. Skips the tests if it does not start in several attempts."""
    from ray.cluster_utils import Cluster

    failure = ""
    for _ in range(ATTEMPTS):
        cluster = Cluster()
        try:
            cluster.add_node(**HEAD)
            for _ in range(GPU_NODES):
                cluster.add_node(**NODE)
            ray.init(cluster.address, log_to_driver=False, namespace="sluice")
            break
        except Exception as error:  # noqa: BLE001 - Ray can fail to start in many ways
            failure = f"{type(error).__name__}: {error}"
            ray.shutdown()
            cluster.shutdown()
    else:
        pytest.skip(f"ray did not come up in {ATTEMPTS} attempts: {failure[:300]}")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def variables(pid: int) -> dict[str, str]:
    """Environment of a process; empty if it belongs to another user or has ended."""
    try:
        text = Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def ranks(ring: Ring) -> list[int]:
    """Process ids of the ranks, in order."""
    port = variables(ring.pids["engine-0"])["MASTER_PORT"]
    pids = [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit()]
    environments = {pid: environment for pid in pids if (environment := variables(pid)).get("MASTER_PORT") == port}
    return sorted(environments, key=lambda pid: int(environments[pid]["RANK"]))


def test_streams_survive_the_death_of_a_rank_an_actor_and_a_node(cluster) -> None:
    def lose_node(pid: int) -> None:
        """Remove the node of a rank, whose actor is a child of the node's raylet."""
        raylet = parent(parent(pid))
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        cluster.remove_node(nodes[raylet], allow_graceful=False)

    strikes: dict[str, Callable[[], None]] = {
        "rank 1": lambda: os.kill(ranks(ring)[1], signal.SIGKILL),
        "actor of rank 0": lambda: os.kill(parent(ranks(ring)[0]), signal.SIGKILL),
        "node of rank 1": lambda: lose_node(ranks(ring)[1]),
    }
    events = Events()
    with Ring(observe=events, **OPTIONS) as ring:
        places = [variables(pid) for pid in ranks(ring)]
        assert [(place["RANK"], place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"]) for place in places] == [
            ("0", "0", "1"),
            ("1", "0", "1"),
        ]
        assert len({parent(parent(pid)) for pid in ranks(ring)}) == RANKS
        undisturbed = asyncio.run(undisturbed_streams(ring))
        for victim, strike in strikes.items():
            before = ranks(ring)
            events.clear()
            assert asyncio.run(streams_over(strike, ring.addresses)) == undisturbed
            assert wait_until(lambda: ("engine-0", "service_recovered") in events, PATIENCE), (victim, events)
            assert events.count(("engine-0", "service_exited")) == 1, (victim, events)
            assert wait_until(lambda pids=before: not any(map(is_alive, pids))), victim
            assert len(ranks(ring)) == RANKS
        processes = [*ranks(ring), *map(parent, ranks(ring))]
    assert wait_until(lambda: not any(map(is_alive, processes)))
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())
