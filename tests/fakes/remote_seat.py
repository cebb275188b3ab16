"""A seat of this process that can be away, made anew or lost, as an actor can."""

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
            raise SeatLostError("no such actor")
        if self.away:
            raise SeatAwayError("not now")
        with self._calls:
            return getattr(self.seat, method)(*arguments)

    def send(self, method: str, *arguments: Any) -> None:
        if not (self.away or self.lost):
            with self._calls:
                getattr(self.seat, method)(*arguments)

    def make_anew(self) -> None:
        """As Ray does after its process was killed; the service has died with it.

        No call comes in between: the former seat would tell that its service was killed.
        """
        with self._calls:
            self.seat.close()
            self.seat = Seat("127.0.0.1", {})
