from collections.abc import Iterator

import pytest

from sluice.executor import GenerationExecutor
from tests.fakes.server import serve
from tests.fakes.server_script import Script


@pytest.fixture
def script() -> Script:
    """The fake server's answers. Tests change them before a call."""
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serve(script) as server_address:
        yield server_address


@pytest.fixture
def executor(address: str) -> Iterator[GenerationExecutor]:
    executor = GenerationExecutor.connect(address, iter_stats_max_iterations=0, resume_timeout=0)
    yield executor
    executor.shutdown(abort=True)
