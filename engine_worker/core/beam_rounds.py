"""Advances the beam searches of live requests: forks and drops the sequences that are their beams.

A beam is an ordinary sequence: the beams of a request need not run in the same step, and each may be preempted. After
its draw a beam is not due until all beams of its search have delivered their candidates.
"""

from engine_worker.core.live import LiveRequests
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import Request, Sequence, State
from engine_worker.step import Drawn
from sluice.wire.errors import ErrorCode, Fault, FinishReason
from sluice.wire.rows import TokenLogprob


class BeamRounds:
    def __init__(self, live: LiveRequests, cache: KvCacheManager, max_batch_size: int) -> None:
        """`max_batch_size`: limit on sequences that hold memory."""
        self._live = live
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._incomplete: dict[Request, None] = {}
        """Searches of which some beams, but not all, have delivered their candidates."""

    def deliver(self, beam: Sequence, drawn: Drawn, now: float) -> None:
        """Store a beam's candidates. The last beam to deliver starts the next round."""
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
        """Call before scheduling. Beams that wait for siblings without memory release theirs, so that all beams of a
        search get their turn even in a small pool. The prefix cache keeps their blocks, as after preemption."""
        for request in list(self._incomplete):
            if not request.num_live:
                del self._incomplete[request]
                continue
            lacking = any(beam.best is None and not beam.blocks for beam in request.sequences)
            for beam in request.sequences:
                if beam.best is not None and beam.state is not State.AWAITING and (lacking or not beam.blocks):
                    self._live.park(beam)

    def _advance(self, request: Request, now: float) -> None:
        search = request.search
        if search is None:
            raise ValueError("the request is not a beam search")
        # In the order of the search's paths.
        beams = list(request.sequences)
        children = search.advance([beam.best or () for beam in beams])
        if search.ended:
            self._end(request, now)
            return
        parents = {child.parent for child in children}
        # Before the forks, which may need their memory.
        for index, beam in enumerate(beams):
            if index not in parents:
                self._live.withdraw(beam)
        free_indexes = iter(sorted(set(range(search.width)) - {beams[index].index for index in parents}))
        # By parent: the token of its first child, which continues the parent's own sequence.
        first: dict[int, int] = {}
        next_beams = []
        for parent, token in children:
            if parent not in first:
                first[parent] = token
                next_beams.append(beams[parent])
            else:
                next_beams.append(self._fork(beams[parent], next(free_indexes), token))
        # After the forks, which copy the parents' tokens.
        for parent, token in first.items():
            self._continue(beams[parent], token)
        request.sequences = tuple(next_beams)
        request.num_live = len(next_beams)

    def _fork(self, parent: Sequence, index: int, token: int) -> Sequence:
        child = parent.fork(index)
        child.append(token)
        self._live.activate(child)
        # If it cannot be forked, it waits without memory and later finds the full blocks in the prefix cache.
        if parent.blocks and len(self._cache.holders) < self._max_batch_size and self._cache.fork(parent, child):
            child.state = State.RUNNING
        return child

    def _continue(self, beam: Sequence, token: int) -> None:
        beam.append(token)
        beam.best, beam.due = None, True
        if beam.state is State.AWAITING:
            self._live.activate(beam)

    def _end(self, request: Request, now: float) -> None:
        finished, n = request.search.finished if request.search else [], request.submit.n
        if len(finished) < n:
            message = f"beam search found {len(finished)} of {n} outputs: the allowed tokens lead to no others"
            fault = Fault(ErrorCode.NOTHING_TO_SAMPLE.name, message)
            self._live.end_request(request, FinishReason.ERROR, now, fault=fault)
            return
        results: list[tuple[list[int], list[TokenLogprob], FinishReason]] = []
        for hypothesis in finished[:n]:
            steps = hypothesis.path.steps()
            results.append(([step.token for step in steps], [step.logprob for step in steps], hypothesis.reason))
        self._live.end_search(request, results, now)
