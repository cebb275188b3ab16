"""What a request needs before its first step, of several kinds."""

from collections.abc import Callable, Sequence

from engine_worker.protocol import Preparation
from sluice.ring.errors import Fault


class Preparations:
    """All of a request's; see `engine_worker.protocol.Preparation`."""

    def __init__(self, parts: Sequence[Preparation], advance: Callable[[], None]) -> None:
        """`advance`: updates all preparations of every kind."""
        self._parts = parts
        self._advance = advance

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    @property
    def fault(self) -> Fault | None:
        return next((part.fault for part in self._parts if part.fault is not None), None)

    def poll(self) -> bool:
        self._advance()
        return self.done

    def withdraw(self) -> None:
        for part in self._parts:
            if not part.done:
                part.withdraw()
