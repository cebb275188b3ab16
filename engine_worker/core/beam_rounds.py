"""The sequences that carry the beams of live searches: they draw, wait for each other, are forked and dropped.

A beam is a sequence like any other, so beams of a request need not run in the same step, and each may be paused. After
its draw a beam is not due until all beams of its search have delivered their candidates.
"""

from engine_worker.core.live import LiveRequests
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import Request
from engine_worker.sequence import Sequence, State
from engine_worker.step import Drawn
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.rows import TokenLogprob


class BeamRounds:
    def __init__(self, live: LiveRequests, cache: KvCacheManager, max_batch_size: int) -> None:
        """`max_batch_size`: limit on sequences that hold memory."""
        self._live = live
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._incomplete: dict[Request, None] = {}
        """Searches of which some beams, but not all, have delivered."""

    def deliver(self, beam: Sequence, drawn: Drawn, now: float) -> None:
        """A beam's candidates; those of the last one begin the next round."""
        request = beam.request
        beam.best = drawn.best
        request.last_token_at = now
        if beam.first_token_at is None:
            beam.first_token_at = now
        if any(sibling.best is None for sibling in request.sequences):
            self._incomplete[request] = None
            return
        self._incomplete.pop(request, None)
        self._advance(request, now)

    def park(self) -> None:
        """Before scheduling: beams that wait for siblings without memory give back their own, so that however small the
        pool is, the beams of a search get their turn. They are found again in the prefix cache, as after a pause."""
        for request in list(self._incomplete):
            if not request.num_live:
                del self._incomplete[request]
                continue
            needed = any(beam.best is None and not beam.blocks for beam in request.sequences)
            for beam in request.sequences:
                if beam.best is not None and beam.state is not State.AWAITING and (needed or not beam.blocks):
                    self._live.park(beam)

    def _advance(self, request: Request, now: float) -> None:
        search = request.search
        if search is None:
            raise ValueError("the request is no beam search")
        # In the order in which the search knows them, the best first.
        beams = list(request.sequences)
        children = search.advance([beam.best or () for beam in beams])
        if search.ended:
            self._end(request, now)
            return
        going_on = {child.parent for child in children}
        # Dropped first: the forks may need their memory.
        for index, beam in enumerate(beams):
            if index not in going_on:
                self._live.drop(beam)
        free = iter(sorted(set(range(search.width)) - {beams[index].index for index in going_on}))
        first: dict[int, int] = {}
        """Token of each parent's first child, which goes on in the parent's place."""
        following = []
        for parent, token in children:
            if parent not in first:
                first[parent] = token
                following.append(beams[parent])
            else:
                following.append(self._fork(beams[parent], next(free), token))
        # After the forks, which copy what the parents had.
        for parent, token in first.items():
            self._go_on(beams[parent], token)
        request.sequences = tuple(following)
        request.num_live = len(following)

    def _fork(self, parent: Sequence, index: int, token: int) -> Sequence:
        child = parent.fork(index)
        child.append(token)
        self._live.activate(child)
        # Else it waits without memory, and finds full blocks in the prefix cache.
        if parent.blocks and len(self._cache.holders) < self._max_batch_size and self._cache.fork(parent, child):
            child.state = State.RUNNING
        return child

    def _go_on(self, beam: Sequence, token: int) -> None:
        beam.append(token)
        beam.best, beam.due = None, True
        if beam.state is State.AWAITING:
            self._live.activate(beam)

    def _end(self, request: Request, now: float) -> None:
        found, n = request.search.finished if request.search else [], request.spec.n
        if len(found) < n:
            message = f"beam search found {len(found)} outputs, n is {n}: no more can follow from the allowed tokens"
            fault = Fault(ErrorCode.NOTHING_TO_SAMPLE.name, message)
            self._live.end_request(request, FinishReason.ERROR, now, fault=fault)
            return
        results: list[tuple[list[int], list[TokenLogprob], FinishReason]] = []
        for hypothesis in found[:n]:
            steps = hypothesis.path.steps()
            results.append(([each.token for each in steps], [each.logprob for each in steps], hypothesis.reason))
        self._live.end_search(request, results, now)
