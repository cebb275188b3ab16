"""An event loop in virtual time: the clock stands still while callbacks run and then jumps to the next timer."""

import asyncio
import selectors


class StuckError(Exception):
    """Deadlock: no callback is ready and no timer is set."""


class _Jumps(selectors.SelectSelector):
    """A selector that advances the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None):
        if timeout is None:
            raise StuckError
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic, provided that nothing on it uses threads or sockets."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now
