"""What a scheduler did wrong, told without flooding the log."""

from collections import Counter

from structlog.stdlib import BoundLogger


class SchedulerWarnings:
    """About one scheduler. Each is logged when it is the first, second, fourth, eighth … of its kind."""

    def __init__(self, name: str, log: BoundLogger) -> None:
        self._counts: Counter[str] = Counter()
        self._name = name
        self._log = log

    def raised(self) -> None:
        """It raised; called while that is handled."""
        self._tell("scheduler_raised", exc_info=True)

    def wrong(self, faults: Counter[str]) -> None:
        """Its answer had these faults, each so often; perhaps none."""
        if faults:
            self._tell("scheduler_wrong", faults=dict(faults))

    def nobody(self, active: int, holders: int) -> None:
        """It let nobody run, though so many live and so many of them hold memory."""
        self._tell("nobody_scheduled", active=active, holders=holders)

    def _tell(self, event: str, **details: object) -> None:
        self._counts[event] += 1
        times = self._counts[event]
        if times & (times - 1) == 0:
            self._log.error(event, scheduler=self._name, times=times, **details)
