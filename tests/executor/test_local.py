"""`LocalRing` with a fake ring."""

import signal
import threading
import time

import pytest

from sluice.executor import local
from sluice.executor.local import LocalRing

CLEANUP_SECONDS = 0.3


class SlowRing:
    """Drains until it is killed, and takes a while to clean up after that."""

    def __init__(self, *_: object, **__: object) -> None:
        self.draining = threading.Event()
        self.killed = threading.Event()
        self.cleaned_up = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.draining.set()
        self.killed.wait()
        time.sleep(CLEANUP_SECONDS)
        self.cleaned_up = True

    def kill(self) -> None:
        self.killed.set()


def test_an_interrupted_close_kills_the_ring_and_waits_until_it_is_cleaned_up(monkeypatch):
    monkeypatch.setattr(local, "Ring", SlowRing)
    ring = LocalRing(None)
    slow, main = ring._ring, threading.get_ident()

    def interrupt() -> None:
        slow.draining.wait()
        # Long enough for `close` to reach its wait. An earlier interrupt would be handled at the start of that wait.
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        ring.close()
    assert slow.cleaned_up
