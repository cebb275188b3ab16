"""The `sluice` command."""

import os
import signal

from sluice.ring.process import INTERRUPTED, TERMINATED, exit_on_interrupt, exit_on_signals


def main() -> None:
    """Ctrl-C prints no traceback, not even during the imports, which take a second, or at exit."""
    exit_on_signals(TERMINATED)
    # gRPC reads it once. Without it, a connection that a router closes is reported on stderr.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from sluice.cli.commands import app

    try:
        # Ignored under nohup, or in the background of a shell: then it stays so.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app(prog_name="sluice")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        exit_on_interrupt()
