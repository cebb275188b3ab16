"""The `sluice` command."""

import os
import signal

from sluice.host.process import INTERRUPTED, TERMINATED, exit_on_interrupt, exit_on_signals


def main() -> None:
    """Run the command line. Ctrl-C prints no traceback, even during the imports, which take a second, and at exit."""
    exit_on_signals(TERMINATED)
    # Otherwise gRPC reports each connection that a router closes on stderr. gRPC reads this variable only once.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from sluice.cli.commands import app

    try:
        # Under nohup, or in the background of a shell, SIGINT is ignored and must stay so.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app(prog_name="sluice")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        exit_on_interrupt()
