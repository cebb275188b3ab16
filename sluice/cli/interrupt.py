"""Ctrl-C that ends a stream in place of the program."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sluice.client import Stream


@contextmanager
def ctrl_c_cancels(stream: Stream) -> Iterator[threading.Event]:
    """Until the end of the `with` block, Ctrl-C cancels the stream and sets the event that this yields."""
    cancelled = threading.Event()

    def on_interrupt(*_: object) -> None:
        cancelled.set()
        # In a thread, since a handler may interrupt the holder of one of gRPC's locks.
        threading.Thread(target=stream.cancel, daemon=True).start()

    former = signal.getsignal(signal.SIGINT)
    # Under nohup, or in the background of a shell, it is ignored and must stay so.
    if former is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield cancelled
    finally:
        signal.signal(signal.SIGINT, former)
