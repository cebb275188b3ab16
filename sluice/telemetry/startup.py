"""The probes of a service that is starting."""


class Startup:
    """`Probes` of a service that is live and not ready. One thread reports, any thread may read."""

    def __init__(self) -> None:
        self.loaded = 0.0
        """Fraction of the weights loaded so far."""
        self._stage = "starting"

    def report(self, stage: str, done: int, total: int) -> None:
        """`stage`: "loading" for the weights, or the name of another stage that takes long."""
        fraction = done / total if total else 1.0
        if stage == "loading":
            self.loaded = fraction
        self._stage = f"{stage} {fraction:.0%}".replace("%", " %")

    def end(self) -> None:
        """Call when the service is ready."""
        self.loaded = 1.0

    def dead(self) -> None:
        """Always live: restarting a service that loads slowly would not help."""

    def not_ready(self) -> str:
        return self._stage
