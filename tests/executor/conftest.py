from collections.abc import Iterator

import pytest

from sluice.client import ClientOptions
from sluice.executor import GenerationExecutor
from sluice.executor.session import Session
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


@pytest.fixture
def local(address, script) -> Iterator[GenerationExecutor]:
    """An executor that treats the fake server as a ring that it started."""
    script.checks_loras = True
    executor = GenerationExecutor(Session([address], 8, 0, ClientOptions(), is_own=True))
    yield executor
    executor.shutdown(abort=True)
