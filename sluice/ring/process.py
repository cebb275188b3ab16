"""What every service process does at its start: die with its parent, end on a signal."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "SLUICE_PARENT_PID"


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Where another service started us, get this signal when it dies (on Linux; elsewhere its clean-up has to do)."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):
        raise SystemExit("the process that started this one has gone")


def on_stop_signal(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM and SIGINT, in the main thread, between two bytecodes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
