"""What a service's probes answer until it is ready."""


class Startup:
    """It is alive, and not ready. One thread reports, any may read."""

    def __init__(self) -> None:
        self.loaded = 0.0
        """Part of the weights that has been loaded."""
        self._stage = "starting"

    def report(self, stage: str, done: int, total: int) -> None:
        """`stage`: "loading" for the weights, or another word for what takes long."""
        part = done / total if total else 1.0
        if stage == "loading":
            self.loaded = part
        self._stage = f"{stage} {part:.0%}".replace("%", " %")

    def end(self) -> None:
        self.loaded = 1.0

    def dead(self) -> None:
        """Never: a slow load is no reason to start over."""

    def not_ready(self) -> str:
        return self._stage
