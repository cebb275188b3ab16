"""Which requests have reached their time limit, without a look at all of them."""

from heapq import heapify, heappop, heappush
from math import inf

from engine_worker.request import Request

SLACK = 64
"""Entries that are kept whether their requests live or not."""


class Deadlines:
    """A heap of requests by deadline. Entries of ended requests never get to be many more than those of live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0
        self._prune_at = SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request that lives, if it has a deadline."""
        if request.deadline == inf:
            return
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if entry[2].num_live]
            heapify(self._heap)
            self._prune_at = SLACK + 2 * len(self._heap)
        self._count += 1
        heappush(self._heap, (request.deadline, self._count, request))

    def reached(self, now: float) -> list[Request]:
        """Requests that live and whose deadline has come, each told once."""
        reached = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if request.num_live:
                reached.append(request)
        return reached
