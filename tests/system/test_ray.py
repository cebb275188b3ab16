"""A ring on a local Ray cluster: each actor is killed in turn, and neither changes a stream nor leaves processes.

    SLUICE_TEST_RAY=1 python -m pytest tests/system/test_ray.py

This takes some minutes, so it is not part of `make test`.
"""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from sluice.launch import OptionsError, Ring
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

CPUS = 8
NAMES = ["engine-0", "engine-1", "detok-0", "detok-1", "router-0", "router-1"]
OPTIONS = {
    "on": "ray",
    "host": "0.0.0.0",
    "router_args": {"insecure": True},
    "engine_args": {"device": "cpu", "threads": 1},
    "start_timeout": 300.0,
}


@pytest.fixture(scope="module")
def cluster():
    """A local cluster. Skips the tests if it does not start in several attempts."""
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
        except Exception as error:  # noqa: BLE001 - Ray can fail to start in many ways
            failure = f"{type(error).__name__}: {error}"
            ray.shutdown()
    else:
        pytest.skip(f"ray did not come up in {ATTEMPTS} attempts: {failure[:300]}")
    yield
    ray.shutdown()


def keys(pid: int) -> Path:
    """The key folder of a service."""
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return Path(command[command.index("--keys") + 1])


def test_streams_survive_the_death_of_every_actor(cluster) -> None:
    events, secrets = Events(), set[Path]()
    with Ring(engines=2, detokenizers=2, routers=2, observe=events, **OPTIONS) as ring:
        assert sorted(ring.pids) == sorted(NAMES)
        undisturbed = asyncio.run(undisturbed_streams(ring))
        for name in NAMES:
            actor = parent(ring.pids[name])
            events.clear()
            secrets.add(keys(ring.pids[name]))
            assert asyncio.run(streams_over(partial(os.kill, actor, signal.SIGKILL), ring.addresses)) == undisturbed
            assert wait_until(lambda name=name: (name, "service_recovered") in events, PATIENCE), (name, events)
            assert events == [(name, "service_exited"), (name, "service_recovered")]
            assert parent(ring.pids[name]) != actor
            assert not is_alive(actor)
        pids = list(ring.pids.values())
        secrets |= set(map(keys, pids))
        assert len(secrets) == 2 * len(NAMES)
        processes = pids + [parent(pid) for pid in pids]
    assert wait_until(lambda: not any(map(is_alive, processes)))
    assert wait_until(lambda: not any(folder.exists() for folder in secrets))


def test_a_loopback_address_is_refused() -> None:
    with pytest.raises(OptionsError, match=r"host 127\.0\.0\.1: on Ray, routers run on other machines"):
        Ring(on="ray")
