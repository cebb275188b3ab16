"""Calls of a method on several ranks. Rank 0 runs it between its steps; it is sent to other ranks as a command."""

from collections.abc import Callable
from concurrent.futures import Future

from engine_worker.runner.finished import Finished
from sluice.wire.calls import MethodCall, RankAnswer, failed

Poll = Callable[[], list[RankAnswer] | None]


class PendingCall:
    """See `engine_worker.protocol.PendingCall`."""

    def __init__(
        self, rank_0: "Future[RankAnswer] | Finished[RankAnswer] | None", others: Poll, refused: list[RankAnswer]
    ) -> None:
        """`rank_0`: answer of rank 0, if the call names it. `others`: polls the other ranks. `refused`: answers for
        ranks that do not exist."""
        self._rank_0 = rank_0
        self._others = others
        self._refused = refused

    def poll(self) -> list[RankAnswer] | None:
        if self._rank_0 is not None and not self._rank_0.done():
            return None
        others = self._others()
        if others is None:
            return None
        rank_0 = [] if self._rank_0 is None else [self._rank_0.result()]
        return [*rank_0, *others, *self._refused]


def refused(call: MethodCall, num_ranks: int) -> list[RankAnswer]:
    """An answer for each rank that the call names and that does not exist."""
    error = f"this rank does not exist: the engine's last rank is {num_ranks - 1}"
    return [failed(rank, error) for rank in sorted(set(call.ranks)) if rank >= num_ranks]
