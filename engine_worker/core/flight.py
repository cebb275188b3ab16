"""A step on its way: launched, its results not looked at yet."""

from dataclasses import dataclass

from engine_worker.core.planning import Part, plan
from engine_worker.scheduling.simple import Schedule
from engine_worker.step import Drawn, Launched, Move, Runner, Step


@dataclass(frozen=True, slots=True)
class Flight:
    """A schedule, what of it each sequence gets, and the runner's end of it."""

    schedule: Schedule
    parts: list[Part]
    num_draws: int
    moves: tuple[Move, ...]
    launched: Launched
    start: float
    """When it began to be planned, by the engine's clock."""

    @classmethod
    def launch(cls, runner: Runner, schedule: Schedule, moves: tuple[Move, ...], start: float) -> "Flight":
        """Set a step off. Whatever goes wrong with it is told when it is collected."""
        parts, slices, num_draws = plan(schedule)
        return cls(schedule, parts, num_draws, moves, _launch(runner, Step(tuple(slices), moves)), start)

    @property
    def forks(self) -> bool:
        """Sequences that await a prompt begin with its results."""
        return any(len(part.drawers) > 1 for part in self.parts[len(self.schedule.generation) :])

    def collect(self) -> list[Drawn]:
        """Wait for the results, one per drawer. Raises what the runner raises, and RuntimeError on a wrong number."""
        drawn = self.launched.collect()
        if len(drawn) != self.num_draws:
            raise RuntimeError(f"the runner drew {len(drawn)} tokens")
        return drawn


class _Failed:
    """A step that could not even be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def collect(self) -> list[Drawn]:
        """Raise what stopped it."""
        raise self._error


def _launch(runner: Runner, step: Step) -> Launched:
    try:
        return runner.launch(step)
    except Exception as error:  # noqa: BLE001 - only the sequences of this step pay for it, in their turn
        return _Failed(error)
