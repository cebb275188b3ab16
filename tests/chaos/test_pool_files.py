"""Engines with pool files: streams whose engine dies, freezes, drains or restarts compute almost nothing again."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.deaths.precisions import PRECISIONS, STORED
from tests.chaos.disturbed_streams import PoolFileRing
from tests.fakes.ports import start_with_metrics
from tests.fakes.processes import LIMIT

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

PEER_TIMEOUT = 5.0
"""Seconds; long enough that a busy machine makes no live peer count as lost."""


def start(block: int, exact: bool, model: Path | None = None, **settings: Any) -> Iterator[PoolFileRing]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sluice-test-") as folder:
        engine_args = {"kv_folder": folder, "kv_cache_tokens": 12_000} | settings
        arguments = {"router_args": {"peer_timeout": PEER_TIMEOUT}, "engine_args": engine_args}
        ring = start_with_metrics(2, 1, model=model, **arguments)
        try:
            yield PoolFileRing(ring, Path(folder), block, exact=exact)
        finally:
            ring.stop()


@pytest.fixture(scope="module")
def tiny() -> Iterator[PoolFileRing]:
    yield from start(16, exact=False, backend="torch")


@pytest.fixture(scope="module", params=["float32", "int8", "Q4_1"])
def real(request: pytest.FixtureRequest, real_model: Path, real_gguf: Path) -> Iterator[PoolFileRing]:
    model = real_gguf if request.param == STORED else real_model
    yield from start(32, exact=True, model=model, backend="openvino", **PRECISIONS[request.param])


BOTH = ("engine-0", "engine-1")


def kill(ring: PoolFileRing, *names: str) -> None:
    for name in names:
        os.kill(ring.ring.pids[name], signal.SIGKILL)


def kill_twice(ring: PoolFileRing, name: str) -> None:
    """The second time once it has restarted."""
    for _ in range(2):
        pid, end = ring.ring.pids[name], time.monotonic() + LIMIT
        kill(ring, name)
        while ring.ring.pids.get(name, pid) == pid or name not in ring.computed():
            assert time.monotonic() < end
            time.sleep(0.05)


async def test_streams_of_a_killed_engine_continue_from_its_blocks(tiny: PoolFileRing) -> None:
    assert await tiny.disturb(lambda name: kill(tiny, name)) <= tiny.limit
    tiny.wait_until_ready()


async def test_streams_wait_for_a_restart_if_all_engines_are_killed(tiny: PoolFileRing) -> None:
    assert await tiny.disturb(lambda _: kill(tiny, *BOTH)) <= tiny.limit
    tiny.wait_until_ready()


async def test_streams_of_a_crash_loop_continue_from_their_blocks(tiny: PoolFileRing) -> None:
    assert await tiny.disturb(lambda name: kill_twice(tiny, name)) <= 2 * tiny.limit
    tiny.wait_until_ready()


async def test_streams_of_a_draining_engine_continue_from_its_blocks(tiny: PoolFileRing) -> None:
    assert await tiny.disturb(lambda name: os.kill(tiny.ring.pids[name], signal.SIGTERM)) <= tiny.limit
    tiny.wait_until_ready()


async def test_streams_of_a_frozen_engine_continue_from_its_blocks(tiny: PoolFileRing) -> None:
    frozen = list[int]()

    def freeze(name: str) -> None:
        frozen.append(tiny.ring.pids[name])
        os.kill(frozen[0], signal.SIGSTOP)

    try:
        assert await tiny.disturb(freeze) <= tiny.limit
    finally:
        os.kill(frozen[0], signal.SIGCONT)
    tiny.wait_until_ready()


async def test_streams_of_a_real_model_continue_with_the_same_bits(real: PoolFileRing) -> None:
    """On a twin, and then after the restart of both engines."""
    assert await real.disturb(lambda name: kill(real, name)) <= real.limit
    real.wait_until_ready()
    assert await real.disturb(lambda _: kill(real, *BOTH)) <= real.limit
    real.wait_until_ready()
