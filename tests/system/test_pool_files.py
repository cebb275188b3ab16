"""Engines with pool files: streams whose engine dies, freezes, drains or restarts compute almost nothing again."""

import asyncio
import fcntl
import os
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bench.deaths.freeze import Leftovers, leftovers
from sluice import AsyncClient
from sluice.launch import Ring
from tests.fakes.ports import start_with_metrics
from tests.fakes.processes import LIMIT

pytestmark = pytest.mark.timeout(300)

PEER_TIMEOUT = 5.0
"""Seconds; long enough that a busy machine makes no live peer count as lost."""
BLOCK = 16
"""Tokens per block."""
PROMPT = "def f(x):\n    return x + 1\n\n\n" * 40
TOKENS = 300
STREAMS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "seed": 2, "n": 2}]
SEQUENCES = 4
BEGUN = 20
"""Tokens of a stream's first output after which the engines may be disturbed."""
AGAIN = BLOCK + 1
"""Limit on the tokens that a sequence computes again: its last block, and the newest token."""
NOTHING = Leftovers([])
COUNTED = re.compile(r"^sluice_engine_context_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)

Outputs = dict[int, tuple[str, list[int]]]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sluice-test-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def ring(folder: Path) -> Iterator[Ring]:
    engine_args = {"kv_folder": str(folder), "kv_cache_tokens": 24000, "tokens_per_block": BLOCK, "backend": "torch"}
    arguments = {"router_args": {"peer_timeout": PEER_TIMEOUT}, "engine_args": engine_args}
    ring = start_with_metrics(2, 1, **arguments)
    try:
        yield ring
    finally:
        ring.stop()


async def follow(client: AsyncClient, options: dict, salt: str, begun: asyncio.Semaphore) -> Outputs:
    """Read a stream. Releases `begun` after the first tokens."""
    outputs: Outputs = {}
    released = False
    stream = client.stream(
        PROMPT, max_tokens=TOKENS, ignore_eos=True, token_ids=True, kv_cache={"salt": salt}, **options
    )
    async for chunk in stream:
        text, tokens = outputs.get(chunk.index, ("", []))
        if chunk.token_ids:
            assert chunk.token_offset == len(tokens)
        outputs[chunk.index] = (text + chunk.text, [*tokens, *chunk.token_ids])
        if not released and len(outputs.get(0, ("", []))[1]) > BEGUN:
            released = True
            begun.release()
    return outputs


def computed(ring: Ring) -> dict[str, float]:
    """Context tokens that each engine has computed since its start. Engines that do not answer are left out."""
    found = {}
    for number in range(2):
        with suppress(OSError):
            url = f"http://127.0.0.1:{ring.plan.metrics_port + 1 + number}/metrics"
            with urllib.request.urlopen(url, timeout=2.0) as answer:
                page = answer.read().decode()
            if counted := COUNTED.search(page):
                found[f"engine-{number}"] = float(counted[1])
    return found


async def check_disturbed(ring: Ring, salt: str, disturb) -> float:
    """Streams that are disturbed in the middle equal undisturbed ones. Returns the context tokens that were computed
    after the disturbance. `salt`: differs in each test, so that blocks of former tests are not found."""
    async with AsyncClient(ring.addresses, timeout=2 * LIMIT) as client:
        assert await leftovers(client, ring) == NOTHING
        never = asyncio.Semaphore(0)
        expected = [await follow(client, options, f"undisturbed {salt}", never) for options in STREAMS]
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(follow(client, options, salt, begun)) for options in STREAMS]
        for _ in streams:
            await begun.acquire()
        assert not any(stream.done() for stream in streams)
        before = computed(ring)
        await asyncio.to_thread(disturb)
        assert await asyncio.gather(*streams) == expected
        after = computed(ring)
        # An engine that was restarted counts from 0.
        former = {name: before.get(name, 0.0) for name in after}
        return sum(count - (former[name] if count >= former[name] else 0.0) for name, count in after.items())


def dead_files(folder: Path) -> list[str]:
    """Files without an owner."""
    return [path.name for path in folder.glob("*/*.pool") if _is_dead(path)]


def _is_dead(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def wait_until_ready(ring: Ring, folder: Path, living: int = 2) -> None:
    """Until all engines have restarted: each has a file, and no file is dead."""
    end = time.monotonic() + LIMIT
    while len(list(folder.glob("*/*.pool"))) != living or dead_files(folder) or len(computed(ring)) < living:
        assert time.monotonic() < end
        time.sleep(0.1)


async def test_streams_of_killed_engines_continue_from_their_blocks(ring: Ring, folder: Path) -> None:
    def kill() -> None:
        os.kill(ring.pids["engine-0"], signal.SIGKILL)

    recomputed = await check_disturbed(ring, "killed", kill)
    wait_until_ready(ring, folder)
    assert recomputed <= SEQUENCES * AGAIN


async def test_streams_of_both_engines_after_both_are_killed(ring: Ring, folder: Path) -> None:
    """They wait for a restart, which adopts the blocks."""

    def kill() -> None:
        for name in ("engine-0", "engine-1"):
            os.kill(ring.pids[name], signal.SIGKILL)

    recomputed = await check_disturbed(ring, "both", kill)
    wait_until_ready(ring, folder)
    assert recomputed <= SEQUENCES * AGAIN


async def test_streams_of_a_crash_loop(ring: Ring, folder: Path) -> None:
    """The engine is killed again as soon as it has restarted."""

    def kill_twice() -> None:
        for _ in range(2):
            pid = ring.pids["engine-1"]
            os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + LIMIT
            while ring.pids.get("engine-1", pid) == pid or "engine-1" not in computed(ring):
                assert time.monotonic() < end
                time.sleep(0.05)

    recomputed = await check_disturbed(ring, "loop", kill_twice)
    wait_until_ready(ring, folder)
    assert recomputed <= 2 * SEQUENCES * AGAIN


async def test_streams_of_a_draining_engine_continue_from_its_blocks(ring: Ring, folder: Path) -> None:
    recomputed = await check_disturbed(ring, "drained", lambda: os.kill(ring.pids["engine-0"], signal.SIGTERM))
    wait_until_ready(ring, folder)
    assert recomputed <= SEQUENCES * AGAIN


async def test_streams_of_a_frozen_engine_continue_from_its_blocks(ring: Ring, folder: Path) -> None:
    pid = ring.pids["engine-0"]
    try:
        recomputed = await check_disturbed(ring, "frozen", lambda: os.kill(pid, signal.SIGSTOP))
        assert recomputed <= SEQUENCES * AGAIN
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until_ready(ring, folder)
