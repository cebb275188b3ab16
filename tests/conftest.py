import gc
import inspect
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from bench.harness import real_model as smollm2
from tests import examples
from tests.fakes.server import serve
from tests.fakes.server_script import Script
from tests.forks.processes import Template, popen_of

# While modules are imported, garbage collections would take almost half of the time. Enabled again below.
gc.disable()

TESTS = Path(__file__).parent
MARKS = {"process": ("chaos", "packaging", "system"), "slow": ("chaos", "fuzz", "parity", "sim", "system")}
"""Folders whose tests get a marker. Files elsewhere set theirs: `pytestmark = pytest.mark.process`."""

PROCESS_SECONDS = 300
"""Timeout of a test that starts processes. On a busy machine a ring may need minutes to start."""

EXACT = ("chaos", "parity")
"""Folders whose tests compare tokens, and therefore have no second attempt."""

settings.load_profile(examples.PROFILE)

# By default structlog renders tracebacks by rich with local variables, which takes more than a second each.
CONSOLE = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[structlog.processors.add_log_level, structlog.dev.set_exc_info, CONSOLE])

# A background job of a shell ignores SIGINT, and nohup ignores SIGHUP. Child processes would inherit that and would not
# end when a test interrupts them. Handlers are not inherited, so installing one restores the default in children.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add markers by folder, and run slow files first, so that with several workers none runs alone at the end."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        for mark, folders in MARKS.items():
            if folder in folders:
                item.add_marker(mark)
        if item.get_closest_marker("process") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PROCESS_SECONDS))
        if folder not in EXACT and depends_on_time(item):
            item.add_marker(pytest.mark.flaky(reruns=1))
    for cases in cases_by_test(items).values():
        leave_out(cases)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def cases_by_test(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each parametrized test that is marked `quick`, without those that are `long` anyway."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("long"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests


def leave_out(cases: list[pytest.Item]) -> None:
    """Mark as `long` all cases except the number that `quick` states, spread evenly from the first to the last."""
    (count,) = cases[0].get_closest_marker("quick").args
    kept = {round(place * (len(cases) - 1) / max(count - 1, 1)) for place in range(count)}
    for place, item in enumerate(cases):
        if place not in kept:
            item.add_marker(pytest.mark.long)


def depends_on_time(item: pytest.Item) -> bool:
    """Whether a stall of the machine can fail this test. It then has a second attempt, reported as RERUN."""
    function = getattr(item, "obj", None)
    if hasattr(function, "is_hypothesis_test"):
        return False
    return item.get_closest_marker("process") is not None or inspect.iscoroutinefunction(function)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection: they stay alive anyway."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def service_template() -> Iterator[None]:
    """Services that tests of this worker start are forks of one process, but not those that other programs start, such
    as `sluice serve`."""
    template, popen = Template(), subprocess.Popen
    subprocess.Popen = popen_of(template)  # type: ignore[misc]
    yield
    subprocess.Popen = popen  # type: ignore[misc]
    template.close()


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, a model of real size with a chat template."""
    try:
        return smollm2.real_model()
    except smollm2.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """The same model as a GGUF file, Q4_1."""
    try:
        return smollm2.real_gguf()
    except smollm2.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def script() -> Script:
    """The answers of the fake router at `address`. Tests change them before a call."""
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serve(script) as server_address:
        yield server_address
