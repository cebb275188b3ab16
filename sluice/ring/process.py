"""What every service process does: exits silently or with one clear line, and dies with its parent."""

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
"""Event of the last line of a service that exits with an explained error."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def exit_on_interrupt() -> None:
    """Until another handler is installed, SIGINT ends the process at once, with status INTERRUPTED and no traceback.

    To be called before slow imports: a KeyboardInterrupt may be swallowed or replaced by the library being imported.
    If SIGINT is ignored, as under nohup, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def run_service(service: str, main: Callable[[], None]) -> None:
    """Run `main`. The text of a SystemExit becomes one line on stderr: JSON like the log, but plain on a terminal."""
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
    """If the launcher started us, get this signal when it dies. Linux only; elsewhere the launcher has to clean up."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):
        raise SystemExit("the parent process has exited")


def on_stop_signal(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM and SIGINT, from a signal handler in the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
