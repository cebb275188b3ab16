"""Who speaks at an address where one process after the other is started: a new one, or still a former one."""

from typing import NamedTuple

MAX_FORMER = 64
"""That are remembered: whoever slept through their restarts finds late messages of them all."""


class Epochs(NamedTuple):
    """Epochs that were met at one address. To begin with none."""

    latest: int | None = None
    former: tuple[int, ...] = ()

    def is_former(self, epoch: int) -> bool:
        """Whether another took its place: what still comes of it is late."""
        return epoch in self.former

    def replaced_by(self, epoch: int) -> bool:
        """Whether this is one that takes the place of the latest."""
        return self.latest not in (None, epoch) and epoch not in self.former

    def met(self, epoch: int) -> "Epochs":
        """These, with one that speaks now."""
        if self.latest is None:
            return Epochs(epoch)
        return Epochs(epoch, (*self.former, self.latest)[-MAX_FORMER:]) if self.replaced_by(epoch) else self
