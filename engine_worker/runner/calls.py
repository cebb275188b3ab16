"""A call of a method on all ranks: rank 0 runs it in the order of its steps, the others as one more command."""

from collections.abc import Callable
from concurrent.futures import Future

from engine_worker.runner.finished import Finished
from sluice.ring.calls import MethodCall, RankAnswer, failed

Poll = Callable[[], list[RankAnswer] | None]


class PendingCall:
    """See `engine_worker.protocol.PendingCall`."""

    def __init__(
        self, own: "Future[RankAnswer] | Finished[RankAnswer] | None", others: Poll, refused: list[RankAnswer]
    ) -> None:
        """`own`: of rank 0, if it is named; `others`: of the ranks above; `refused`: of ranks that do not exist."""
        self._own = own
        self._others = others
        self._refused = refused

    def poll(self) -> list[RankAnswer] | None:
        if self._own is not None and not self._own.done():
            return None
        others = self._others()
        if others is None:
            return None
        own = [] if self._own is None else [self._own.result()]
        return [*own, *others, *self._refused]


def refused(call: MethodCall, num_ranks: int) -> list[RankAnswer]:
    """For each rank that is named and does not exist."""
    error = f"there is no such rank: the engine has {num_ranks}, counted from 0"
    return [failed(rank, error) for rank in sorted(set(call.ranks)) if rank >= num_ranks]
