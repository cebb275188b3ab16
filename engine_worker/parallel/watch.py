"""Notices that a rank has died or does not get on, or that the device does not."""

import threading
import time
from collections.abc import Callable

from engine_worker.parallel.channel import ChannelError, Sender
from engine_worker.parallel.commands import Heartbeat, encode

TICK_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
"""Between two commands that keep idle ranks, and this one, from being taken for dead."""
HEARTBEAT = encode(Heartbeat())


class Watch(threading.Thread):
    """Looks at the other ranks until `stop`, or until one of them is lost."""

    def __init__(
        self,
        sender: Sender,
        size: int,
        ended: Callable[[int], str | None],
        lose: Callable[[str], None],
        waiting: Callable[[], float | None],
        load_seconds: float,
        step_seconds: float,
    ) -> None:
        """`ended`: how the process of a rank did, if it has; `lose` gets why. `waiting`: since when this rank has been
        waiting for a step, if it does. In `load_seconds` each must be through with the first command, which loads; in
        `step_seconds` it must get on with the others, and a step must come back."""
        super().__init__(name="watch", daemon=True)
        self._sender = sender
        self._ended = ended
        self._lose = lose
        self._waiting = waiting
        self._load_seconds = load_seconds
        self._step_seconds = step_seconds
        self._done = dict.fromkeys(range(1, size), 0)
        self._still = dict.fromkeys(range(1, size), 0.0)
        self._since: float | None = None
        self._waited = 0.0
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
                if beaten >= HEARTBEAT_SECONDS:
                    beaten = 0.0
                    # The first command is the one that loads.
                    if self._sender.sent and self._sender.idle():
                        self._sender.send([HEARTBEAT])
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
            limit = self._step_seconds if done else self._load_seconds
            if self._still[rank] > limit:
                return f"rank {rank} has not got on for {limit:g} s"
        # A rank is through with a step once it is queued on its device; what hangs there shows only here.
        since = self._waiting()
        self._waited = self._waited + passed if since is not None and since == self._since else 0.0
        self._since = since
        if self._waited > self._step_seconds:
            return f"a step has not come back for {self._step_seconds:g} s"
        return None
