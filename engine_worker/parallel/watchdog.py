"""Detects ranks that have died or make no progress, and devices that hang."""

import threading
import time
from collections.abc import Callable

from engine_worker.parallel.channel import ChannelError, ChannelSender
from engine_worker.parallel.commands import Heartbeat, encode

TICK_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
"""Interval between heartbeats, without which idle ranks and rank 0 would be taken for dead."""
HEARTBEAT = encode(Heartbeat())


class Watchdog(threading.Thread):
    """Watches the other ranks until `stop`, or until one of them is lost."""

    def __init__(
        self,
        sender: ChannelSender,
        size: int,
        exit_reason: Callable[[int], str | None],
        on_lost: Callable[[str], None],
        has_loaded: Callable[[], bool],
        waiting_since: Callable[[], float | None],
        load_seconds: float,
        step_seconds: float,
    ) -> None:
        """`exit_reason`: how the process of a rank has ended, if it has. `on_lost`: called with the reason.
        `has_loaded`: whether rank 0 knows that all ranks have loaded. `waiting_since`: see `ModelRunner.waiting_since`.
        Time limits: `load_seconds` for the first command, which loads the model; `step_seconds` for every other
        command, and for the results of a step."""
        super().__init__(name="watchdog", daemon=True)
        self._sender = sender
        self._exit_reason = exit_reason
        self._on_lost = on_lost
        self._has_loaded = has_loaded
        self._waiting_since = waiting_since
        self._load_seconds = load_seconds
        self._step_seconds = step_seconds
        self._completed = dict.fromkeys(range(1, size), 0)
        self._stalled = dict.fromkeys(range(1, size), 0.0)
        self._since: float | None = None
        self._waited = 0.0
        self._since_heartbeat = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop watching, since the ranks are about to end."""
        self._stopped.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        checked = time.monotonic()
        while not self._stopped.wait(TICK_SECONDS):
            now = time.monotonic()
            # If this process was suspended, lack of progress in that time says nothing about the other ranks.
            passed, checked = min(now - checked, 2 * TICK_SECONDS), now
            reason = self.tick(passed)
            if reason and not self._stopped.is_set():
                self._on_lost(reason)
                return

    def tick(self, passed: float) -> str | None:
        """Send a heartbeat if one is due. Returns why the group is lost, if it is. `passed`: seconds since the previous
        tick."""
        self._since_heartbeat += passed
        try:
            if self._since_heartbeat >= HEARTBEAT_SECONDS:
                self._since_heartbeat = 0.0
                # The first command must be a LoadModel.
                if self._sender.sent and self._sender.idle():
                    self._sender.send(HEARTBEAT)
            return self._check(passed)
        except ChannelError as error:
            return self._check(0.0) or str(error)

    def _check(self, passed: float) -> str | None:
        """Why the group is lost, if it is. `passed`: seconds since the previous check."""
        sent = self._sender.sent
        for rank, completed_before in self._completed.items():
            if self._sender.disconnected(rank):
                return f"rank {rank} {self._exit_reason(rank) or 'has disconnected'}"
            # A rank that hangs between the group's barrier and its report has nevertheless loaded.
            completed = self._completed[rank] = max(self._sender.completed(rank), int(self._has_loaded()))
            progress = completed > completed_before or completed >= sent
            self._stalled[rank] = 0.0 if progress else self._stalled[rank] + passed
            limit = self._step_seconds if completed else self._load_seconds
            if self._stalled[rank] > limit:
                return f"rank {rank} has made no progress for {limit:g} s"
        # A rank completes a step as soon as it is queued on its device, so only this check detects a device that hangs.
        since = self._waiting_since()
        self._waited = self._waited + passed if since is not None and since == self._since else 0.0
        self._since = since
        if self._waited > self._step_seconds:
            return f"a step has not come back from the device for {self._step_seconds:g} s"
        return None
