"""The `sluice` command."""

import signal
from typing import Any

from sluice.ring.process import INTERRUPTED, exit_on_interrupt

__all__ = ["app", "main"]


def main() -> None:
    """Entry point. Ctrl-C prints no traceback, not even during the imports, which take a second, or at exit."""
    exit_on_interrupt()
    from sluice.cli.commands import app

    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app(prog_name="sluice")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        exit_on_interrupt()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'sluice.cli' has no attribute {name!r}")
    from sluice.cli.commands import app

    return app
