"""A clock that stands still until a test changes `now`."""


class Clock:
    """Called like `time.monotonic`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
