"""Which sequences of a step get drafts, and how many."""

from collections import abc
from typing import NamedTuple

from engine_worker.request import Sequence
from engine_worker.scheduling.simple import Schedule
from engine_worker.speculative.cost import DraftCost
from engine_worker.speculative.drafter import Drafter


class DraftCounts(NamedTuple):
    sequences: int = 0
    drafted: int = 0
    accepted: int = 0


class Drafting:
    """Drafts take what the context leaves of a step's tokens, and the room that sequences have in their blocks: nothing
    is allocated for guesses."""

    def __init__(self, max_tokens_per_step: int, max_batch_size: int) -> None:
        """`max_batch_size`: steps of more sequences have no drafts, which would slow down all of them."""
        self._max_tokens_per_step = max_tokens_per_step
        self._max_batch_size = max_batch_size
        self._cost = DraftCost()
        self._counts = DraftCounts()

    def wants(self, in_flight: Schedule) -> bool:
        """Whether one of these sequences may get drafts once its newest token is known."""
        sequences = [*in_flight.generation, *(sequence for sequence, _ in in_flight.context)]
        return len(sequences) <= self._max_batch_size and any(map(_may_draft, sequences))

    def propose(self, schedule: Schedule) -> dict[Sequence, abc.Sequence[int]]:
        batch_size = len(schedule.generation) + len(schedule.context)
        if batch_size > self._max_batch_size:
            return {}
        asking = [sequence for sequence in schedule.generation if sequence.request.max_drafts]
        if not asking:
            return {}
        budget = self._max_tokens_per_step - len(schedule.generation) - sum(size for _, size in schedule.context)
        found, cost = {}, self._cost.of(batch_size)
        for sequence in asking:
            drafts = _drafter(sequence).propose(sequence.output, min(budget, _room(sequence)), cost)
            if drafts:
                found[sequence] = drafts
                budget -= len(drafts)
        return found

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        counts = self._counts
        self._counts = DraftCounts(counts.sequences + 1, counts.drafted + drafted, counts.accepted + accepted)
        _drafter(sequence).record(drafted, accepted)

    def end_step(self, schedule: Schedule, drafted: int, seconds: float) -> DraftCounts:
        """What was recorded since the step before. `drafted`: tokens of this one, which took so long."""
        batch_size = len(schedule.generation)
        if batch_size <= self._max_batch_size and not schedule.context:
            self._cost.record(batch_size, drafted, seconds)
        counts, self._counts = self._counts, DraftCounts()
        return counts


def _may_draft(sequence: Sequence) -> bool:
    return bool(sequence.request.max_drafts) and not (sequence.drafter and sequence.drafter.paused)


def _room(sequence: Sequence) -> int:
    """Tokens that fit its blocks and its length, if its newest token is known; else 0."""
    if sequence.num_promised or sequence.num_inflight:
        return 0
    # The draw after the last guess is a token, too.
    return min(sequence.num_placed - sequence.num_tokens, sequence.request.max_tokens - sequence.num_tokens - 1)


def _drafter(sequence: Sequence) -> Drafter:
    """Made for the first step that generates: many requests end before."""
    if sequence.drafter is None:
        request = sequence.request
        sequence.drafter = Drafter(request.spec.prompt, request.max_drafts, request.spec.speculation.draft_token_ids)
    return sequence.drafter
