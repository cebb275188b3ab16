"""What every service process does: starts and ends in silence or with one clear line, dies with its parent."""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "SLUICE_PARENT_PID"
START_FAILED = "start_failed"
"""Event of the last line of a service that ends with an error that it explains."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def exit_on_interrupt() -> None:
    """End the process at once on SIGINT, with INTERRUPTED and without a traceback, until another handler is installed.

    To be called before slow imports. An exception is no substitute: libraries in the middle of an import swallow it or
    turn it into another one. Where SIGINT is ignored, as under nohup, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def run_service(service: str, main: Callable[[], None]) -> None:
    """Run the `main` of `python -m SERVICE`. The text of a SystemExit becomes one line on stderr: for a person on a
    terminal, else JSON as all other lines of the log."""
    try:
        main()
    except SystemExit as ending:
        if not isinstance(ending.code, str):
            raise
        print(_last_line(service, ending.code), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _last_line(service: str, error: str) -> str:
    if sys.stderr.isatty():
        return f"python -m {service}: {error}"
    time = datetime.now(UTC).isoformat()
    fields = {"service": service, "error": error, "event": START_FAILED, "level": "error", "timestamp": time}
    return json.dumps(fields)


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
