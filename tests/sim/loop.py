"""An event loop whose time stands still while anything is to do, and then jumps to what comes next."""

import asyncio
import selectors


class StuckError(Exception):
    """Nobody waits for a moment, and nothing else can happen."""


class _Jumps(selectors.SelectSelector):
    """Waiting is moving the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None):
        if timeout is None:
            raise StuckError
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic as long as nothing in it uses threads or sockets."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now
