"""Who may hold memory: the first question of scheduling."""

from collections import abc
from operator import attrgetter
from typing import Protocol

from engine_worker.request import Sequence

IN_ORDER = attrgetter("order")


class CapacityScheduler(Protocol):
    """Decides and moves nothing: the blocks are given and taken by whoever asked."""

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(fitting, paused): who shall hold blocks for all its tokens now, in order, and who shall give them back.

        `active` has every sequence that lives and does not await its prompt, in order. Those in neither list wait, or
        keep what they hold without running.
        """
        ...
