"""Time limits of live requests."""

from heapq import heapify, heappop, heappush
from itertools import count

from engine_worker.request import Request

PRUNE_MIN_ENTRIES = 64
"""Size below which the heap is not pruned."""


class Deadlines:
    """The requests with a time limit, by deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()
        """Break ties between equal deadlines, because requests cannot be compared."""
        self._prune_at = PRUNE_MIN_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """`request` must have a time limit."""
        # Requests that end early leave their entries in the heap: pruning bounds it to about twice the live requests.
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if entry[2].num_live]
            heapify(self._heap)
            self._prune_at = PRUNE_MIN_ENTRIES + 2 * len(self._heap)
        heappush(self._heap, (request.deadline, next(self._numbers), request))

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and return the live requests whose deadline has passed."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if request.num_live:
                expired.append(request)
        return expired
