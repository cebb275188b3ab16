"""Time that stands still until a test moves it."""


class Clock:
    """Seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
