import gc
import inspect
import signal
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests import examples

# Until all modules are imported the collector would search them again and again, for almost half of the time.
gc.disable()

TESTS = Path(__file__).parent
MARKS = {"process": ("chaos", "packaging", "system"), "slow": ("chaos", "fuzz", "parity", "sim", "system")}
"""By folder. A single file elsewhere names its own: `pytestmark = pytest.mark.process`."""

PROCESS_SECONDS = 300
"""Limit of a test that starts processes: a ring may need minutes on a machine that has much else to do."""

EXACT = ("chaos", "parity")
"""Folders whose tests compare tokens. None of them runs a second time."""

settings.load_profile(examples.PROFILE)

# structlog's default renders tracebacks with rich, local variables included: more than a second for each.
CONSOLE = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[structlog.processors.add_log_level, structlog.dev.set_exc_info, CONSOLE])

# A shell that runs the tests in the background has them ignore Ctrl-C, nohup has them ignore SIGHUP, and ignoring is
# inherited: the processes that the tests interrupt would not end. A handler is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder, and put slow files first: with several workers none of them is left to run alone at the end."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        for mark, folders in MARKS.items():
            if folder in folders:
                item.add_marker(mark)
        if item.get_closest_marker("process") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PROCESS_SECONDS))
        if folder not in EXACT and depends_on_time(item):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def depends_on_time(item: pytest.Item) -> bool:
    """Whether a machine that stalls can fail a correct test. The summary lists each second run as RERUN."""
    function = getattr(item, "obj", None)
    if hasattr(function, "is_hypothesis_test"):
        return False
    return item.get_closest_marker("process") is not None or inspect.iscoroutinefunction(function)


def pytest_collection_finish() -> None:
    """What was imported stays: full collections need not walk through it."""
    gc.freeze()
    gc.enable()
