"""A seat in this process that can be temporarily unreachable, restarted or lost, like a Ray actor."""

import threading
from typing import Any

from sluice.launch.hosts.remote_child import SeatAwayError, SeatLostError
from sluice.launch.hosts.seat import Seat


class FakeRemoteSeat:
    def __init__(self) -> None:
        self.seat = Seat("127.0.0.1", {})
        self.away = False
        self.lost = False
        self._calls = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        if self.lost:
            raise SeatLostError("the actor is dead")
        if self.away:
            raise SeatAwayError("the actor is restarting")
        with self._calls:
            return getattr(self.seat, method)(*arguments)

    def send(self, method: str, *arguments: Any) -> None:
        if not (self.away or self.lost):
            with self._calls:
                getattr(self.seat, method)(*arguments)

    def restart(self) -> None:
        """Restart the seat without its service, as Ray restarts an actor whose process was killed.

        Calls are excluded meanwhile: the old seat would report that its service was killed.
        """
        with self._calls:
            self.seat.close()
            self.seat = Seat("127.0.0.1", {})
