"""What every service process has in common: it exits silently or with one clear line, and dies with its parent."""

# Import only modules that load quickly: until `exit_on_signals` is called, process 1 of a container gets no signals.
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from sluice.host.output import exit_now

Handler = Callable[[int, FrameType | None], None]

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "SLUICE_PARENT_PID"
START_FAILED = "start_failed"
"""Event of the last line of a service that exits with an explained error."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
TERMINATED = 143
"""Exit status after SIGTERM, for a command that has not finished its work."""
STDERR = 2
STOPPED_WHILE_STARTING = b'{"event": "stopped_while_starting", "signal": "SIGTERM", "level": "info"}\n'


def exit_on_signals(terminated: int = 0) -> None:
    """Make SIGTERM exit immediately with status `terminated`, and SIGINT with INTERRUPTED, until handlers are replaced.

    Before an exit with status 0, one log line reports the reason: otherwise nothing would tell why a service ended
    before it served.

    Call this before slow imports. The kernel delivers signals to process 1 of a container only if they have a handler,
    and a library that is being imported may swallow or replace a KeyboardInterrupt. Ignored signals stay ignored, such
    as SIGINT under nohup.
    """
    statuses = {signal.SIGTERM: terminated, signal.SIGINT: INTERRUPTED}
    handlers: dict[int, Handler] = {
        number: _exit_with(status) for number, status in statuses.items() if not _ignored(number)
    }
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _watch(handlers)


def exit_on_interrupt() -> None:
    """Make SIGINT exit immediately, in a process that is about to end."""
    if not _ignored(signal.SIGINT):
        signal.signal(signal.SIGINT, _exit_with(INTERRUPTED))


def _exit_with(status: int) -> Handler:
    def end(*_: object) -> None:
        if status == 0:
            # Not through a buffered stream, because the interrupted code may hold its lock.
            with suppress(OSError):
                os.write(STDERR, STOPPED_WHILE_STARTING)
        os._exit(status)

    return end


def _ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def _watch(handlers: Mapping[int, Handler]) -> None:
    """Call these handlers from a thread too, while they are installed.

    The main thread calls a handler only between two Python instructions, but a single call into a library can take
    minutes, to read weights or to wait for other ranks.
    """
    import threading
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    ends = os.pipe()
    # If a standard descriptor is closed, the pipe must not get its number: libraries may print to it.
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

    # A forked child inherits the pipe, so that a signal to the child would end this process.
    os.register_at_fork(after_in_child=forget)
    threading.Thread(target=watch, name="signals", daemon=True).start()


def run_service(service: str, main: Callable[[], None]) -> NoReturn:
    """Run `main`, then exit. If it raises SystemExit with a text, print that as one line to stderr and exit with
    status 1.

    Without the interpreter's clean-up: `main` has closed what others can see, the kernel frees the rest faster, and
    libraries with threads of their own, such as gRPC, may abort the process while the interpreter takes them down.
    """
    status = 0
    try:
        main()
    except SystemExit as ending:
        match ending.code:
            case str(error):
                print(last_line(service, error), file=sys.stderr, flush=True)
                status = 1
            case int(status):
                pass
    exit_now(status)


def last_line(service: str, error: str) -> str:
    """The reason why a service does not start, as a JSON log line, or as plain text on a terminal."""
    import json
    from datetime import UTC, datetime

    if sys.stderr.isatty():
        return f"python -m {service}: {error}"
    time = datetime.now(UTC).isoformat()
    fields = {"service": service, "error": error, "event": START_FAILED, "level": "error", "timestamp": time}
    return json.dumps(fields)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """If the launcher started this process, receive this signal when the launcher dies. Only works on Linux."""
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
