"""What every service process does: exits silently or with one clear line, and dies with its parent."""

# Only what takes no time: until `exit_on_signals` is called, process 1 of a container gets no signals.
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], None]

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "SLUICE_PARENT_PID"
START_FAILED = "start_failed"
"""Event of the last line of a service that exits with an explained error."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
TERMINATED = 143
"""The same after SIGTERM, for a command that has not done its work."""
STDERR = 2
STOPPED_WHILE_STARTING = b'{"event": "stopped_while_starting", "signal": "SIGTERM", "level": "info"}\n'


def exit_on_signals(terminated: int = 0) -> None:
    """Until other handlers are installed, SIGTERM ends the process at once with this status, SIGINT with INTERRUPTED.

    Before it ends with status 0 it says why: otherwise nothing would show why a service ended that never served.

    To be called before slow imports. The kernel delivers no signal without a handler to process 1 of a container; and a
    KeyboardInterrupt may be swallowed or replaced by the library being imported. What is ignored stays ignored, such as
    SIGINT under nohup.
    """
    statuses = {signal.SIGTERM: terminated, signal.SIGINT: INTERRUPTED}
    handlers: dict[int, Handler] = {
        number: _exit_with(status) for number, status in statuses.items() if not _ignored(number)
    }
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _watch(handlers)


def exit_on_interrupt() -> None:
    """The same for SIGINT alone, in a process that is about to end."""
    if not _ignored(signal.SIGINT):
        signal.signal(signal.SIGINT, _exit_with(INTERRUPTED))


def _exit_with(status: int) -> Handler:
    def end(*_: object) -> None:
        if status == 0:
            # No buffered stream: its lock may be held by what the signal interrupted.
            with suppress(OSError):
                os.write(STDERR, STOPPED_WHILE_STARTING)
        os._exit(status)

    return end


def _ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def _watch(handlers: Mapping[int, Handler]) -> None:
    """Call these from a thread too, as long as they are installed: the main thread calls a handler only between two
    instructions of Python, but one call into a library can read weights, or wait for other ranks, for minutes."""
    import threading
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    ends = os.pipe()
    # Not among the standard descriptors, should one of these be closed: what libraries print is no signal.
    reader, writer = (fcntl(end, F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(reader, 1):
            handler = handlers.get(number[0])
            replaced = signal.getsignal(number[0]) is not handler
            if handler is not None and not replaced:
                handler(number[0], None)

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)

    # A forked child has the same pipe, so that a signal to it would end this process.
    os.register_at_fork(after_in_child=forget)
    threading.Thread(target=watch, name="signals", daemon=True).start()


def run_service(service: str, main: Callable[[], None]) -> None:
    """Run `main`. The text of a SystemExit becomes one line on stderr."""
    try:
        main()
    except SystemExit as ending:
        if not isinstance(ending.code, str):
            raise
        print(last_line(service, ending.code), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def last_line(service: str, error: str) -> str:
    """Why a service does not start: JSON like the log, but plain on a terminal."""
    import json
    from datetime import UTC, datetime

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
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):
        raise SystemExit("the parent process has exited")


def on_stop_signal(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM and SIGINT, from a signal handler in the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
