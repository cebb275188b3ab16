"""The engine's state machine on an engine whose host pool is a file, as on a GPU, beside another one."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis.stateful import invariant

from engine_worker.pool_files.folder import PoolFolder
from sluice.host.memory_files import is_in_memory
from tests.engine_worker.core import machine
from tests.engine_worker.core.machine import EngineMachine
from tests.engine_worker.core.machine_inputs import BASES
from tests.examples import examples
from tests.fakes.engine import EngineBench

SHARED = Path("/dev/shm")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.long,
    pytest.mark.skipif(not is_in_memory(SHARED), reason="this system has no /dev/shm in memory"),
]


class BesideAnother(EngineBench):
    """Copies blocks from an engine that has computed some of the prompts."""

    def __init__(
        self, num_blocks: int, tokens_per_block: int, *sizes, num_host_blocks: int, window, folder, **options
    ) -> None:
        """`folder` is replaced."""
        self._memory_folder = tempfile.TemporaryDirectory(dir=SHARED, prefix="sluice-test-")
        host = {"num_host_blocks": num_host_blocks or 3, "window": window, "host_file": True}
        folder = Path(self._memory_folder.name)
        other = EngineBench(
            128, tokens_per_block, num_host_blocks=128, host_file=True, folder=PoolFolder(folder, "b", print)
        )
        for base in BASES:
            other.submit(base, max_tokens=1)
        other.run()
        super().__init__(num_blocks, tokens_per_block, *sizes, **host, folder=PoolFolder(folder, "a", print), **options)


class HostFileMachine(EngineMachine):
    @invariant()
    def the_file_has_what_is_on_the_host(self):
        """All of it, except what a step has yet to copy."""
        tiers, file = self.bench.cache.tiers, self.bench.runner.pool_file
        valid = {int(block) for block in np.flatnonzero(file._valid)}
        for block in valid:
            stored = tiers.host.stored(block)
            assert stored is not None
            assert stored.content.hash == file._hash[block].tobytes()
            assert file._entries[block]["sum"] == file.sum(block)
        moving = tiers._targets()
        assert valid >= {block for block, _ in tiers.host.contents() if block not in moving}

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "bench"):
            assert not self.bench.cache.tiers.saving
            self.bench._memory_folder.cleanup()


@pytest.fixture(autouse=True)
def engines_with_files(monkeypatch) -> None:
    monkeypatch.setattr(machine, "EngineBench", BesideAnother)


TestHostFile = HostFileMachine.TestCase
TestHostFile.settings = examples(100, stateful_step_count=40, suppress_health_check=list(HealthCheck))
