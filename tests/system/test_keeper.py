"""The keeper of a ring: what it has on disk outlives the ring, and other rings copy what it has in memory."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice import Client
from sluice.host.memory_files import is_in_memory
from sluice.lanes.keys import ROLES
from sluice.lanes.keys import generate as generate_keys
from sluice.launch import LogLine, Ring
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT, is_alive, wait_until

PROMPT = "def fibonacci(n):\n    return n\n\n" * 64
PROMPT_TOKENS = 768
"""More than the `LONG_PREFIX_TOKENS` of sweeps."""
OPTIONS = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
SERVICES = ("router", "engine", "detok", "keeper")
"""In the order of their metrics ports."""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not is_in_memory(Path("/dev/shm")), reason="this system has no /dev/shm in memory"),
]


@contextmanager
def serving(**options: Any) -> Iterator[Ring]:
    """A ring with a keeper; afterwards nothing of it is left."""
    lines: list[LogLine] = []
    with Ring(detokenizers=1, **options, metrics_port=free_ports(len(SERVICES)), observe=lines.append) as ring:
        (folder,) = (Path(line.fields["folder"]) for line in lines if line.event == "kv_cache_in_files")
        assert list(folder.glob("*/engine-0.*.pool"))
        pids = ring.pids
        yield ring
    assert not folder.exists()
    assert not any(map(is_alive, pids.values()))


def generate(ring: Ring) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    with Client(ring.address, timeout=LIMIT) as client:
        result = client.generate(PROMPT, **OPTIONS)
        return result.text, result.usage.cached_tokens


def metrics(ring: Ring, service: str) -> dict[tuple[str, ...], float]:
    """Samples by name and labels."""
    port = ring.plan.metrics_port + SERVICES.index(service)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
        }


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory that a user chose."""
    with TemporaryDirectory(dir="/dev/shm", prefix="sluice-test-") as folder:
        yield Path(folder)


@pytest.mark.long
def test_a_ring_copies_what_another_ring_has_computed(tmp_path: Path, memory: Path) -> None:
    for role in ROLES:
        generate_keys(tmp_path, role)
    address = f"tcp://127.0.0.1:{free_ports(1)}"
    with serving(kv_keeper=address, keys=str(tmp_path)) as owner:
        text, _ = generate(owner)
        theirs = {"kv_keeper": address, "kv_folder": str(memory)}
        port = free_ports(len(SERVICES) - 1)
        with Ring(detokenizers=1, engine_args=theirs, keys=str(tmp_path), metrics_port=port) as reader:
            assert generate(reader)[0] == text
            assert metrics(reader, "engine")["sluice_engine_kv_fetched_blocks_total", "keeper"] > 0
        assert metrics(owner, "keeper")["sluice_keeper_blocks_read_total", "memory"] > 0


@pytest.mark.long
def test_a_prompt_is_read_from_disk_after_the_ring_was_restarted(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with serving(kv_disk=disk) as ring:
        assert set(ring.pids) == {"router", "engine-0", "detok-0", "keeper"}
        text, cached = generate(ring)
        assert cached == 0
        blocks = PROMPT_TOKENS // metrics(ring, "engine")["sluice_engine_kv_block_tokens",]
        assert wait_until(lambda: metrics(ring, "keeper")["sluice_keeper_disk_blocks",] >= blocks)
        stored = len(list(disk.glob("*/*.block")))
        assert stored >= blocks
    with serving(kv_disk=disk) as ring:
        assert metrics(ring, "keeper")["sluice_keeper_disk_blocks",] == stored
        again, cached = generate(ring)
        assert again == text
        assert cached > 512
        assert metrics(ring, "engine")["sluice_engine_kv_fetched_blocks_total", "keeper"] > 0
        assert metrics(ring, "keeper")["sluice_keeper_blocks_read_total", "disk"] > 0
