"""Notices that a rank has died or does not get on."""

import threading
import time
from collections.abc import Callable

from engine_worker.parallel.channel import ChannelError, Sender
from engine_worker.parallel.commands import Beat, encode

TICK_SECONDS = 0.1
BEAT_SECONDS = 1.0
"""Between two commands that keep idle ranks, and this one, from being taken for dead."""
BEAT = encode(Beat())


class Watch(threading.Thread):
    """Looks at the other ranks until `stop`, or until one of them is lost."""

    def __init__(
        self,
        sender: Sender,
        size: int,
        ended: Callable[[int], str | None],
        lose: Callable[[str], None],
        seconds: float,
    ) -> None:
        """`ended`: how the process of a rank did, if it has; `lose` gets why. `seconds`: in which a rank that has
        something to do must get on, changed by `limit`."""
        super().__init__(name="watch", daemon=True)
        self.limit = seconds
        self._sender = sender
        self._ended = ended
        self._lose = lose
        self._done = dict.fromkeys(range(1, size), 0)
        self._still = dict.fromkeys(range(1, size), 0.0)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """From now on their ends are no news."""
        self._stopped.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        """The thread."""
        looked, beaten = time.monotonic(), 0.0
        while not self._stopped.wait(TICK_SECONDS):
            now = time.monotonic()
            # While this process itself stood still, the others' stillness says nothing.
            passed, looked = min(now - looked, 2 * TICK_SECONDS), now
            beaten += passed
            try:
                if beaten >= BEAT_SECONDS:
                    beaten = 0.0
                    if self._sender.idle():
                        self._sender.send([BEAT])
                why = self._look(passed)
            except ChannelError as error:
                why = self._look(0.0) or str(error)
            if why and not self._stopped.is_set():
                self._lose(why)
                return

    def _look(self, passed: float) -> str | None:
        """Who is lost, and why."""
        sent = self._sender.sent
        for rank, before in self._done.items():
            if self._sender.gone(rank):
                return f"rank {rank} {self._ended(rank) or 'has gone'}"
            done = self._done[rank] = self._sender.done(rank)
            self._still[rank] = 0.0 if done > before or done >= sent else self._still[rank] + passed
            if self._still[rank] > self.limit:
                return f"rank {rank} has not got on for {self.limit:g} s"
        return None
