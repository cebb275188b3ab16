"""Which sequences of a step get drafts, and how many."""

from collections import abc
from typing import NamedTuple

from engine_worker.request import Sequence
from engine_worker.scheduling.simple import Schedule
from engine_worker.speculative.cost import FORGETTING, DraftCost
from engine_worker.speculative.drafter import Drafter

TRUST_RATE = 0.05
GAIN = 1.3
"""What drafts must bring by what they cost. More than 1: both are estimates, and a loss is noticed only after it."""


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
        self.cost = DraftCost()
        self._counts = DraftCounts()
        self._expected = 0.0
        """Tokens of the latest drafts that should be accepted."""
        self._trust = 1.0
        """Tokens that were accepted by those that should have been, on average."""

    def wants(self, in_flight: Schedule) -> bool:
        """Whether one of these sequences may get drafts once its newest token is known."""
        sequences = [*in_flight.generation, *(sequence for sequence, _ in in_flight.context)]
        if len(sequences) > self._max_batch_size:
            return False
        cost = self.cost.of(len(sequences))
        return cost is not None and any(_may_draft(sequence, cost.token) for sequence in sequences)

    def propose(self, schedule: Schedule) -> dict[Sequence, abc.Sequence[int]]:
        batch_size = len(schedule.generation) + len(schedule.context)
        if batch_size > self._max_batch_size:
            return {}
        asking = list(filter(_asks, schedule.generation))
        if not asking:
            return {}
        budget = self._max_tokens_per_step - len(schedule.generation) - sum(size for _, size in schedule.context)
        cost = self.cost.of(batch_size)
        found, expected, token_cost = {}, 0.0, 1.0 if cost is None else cost.token
        for sequence in asking:
            drafter = _drafter(sequence)
            if drafter.rests(len(sequence.output)):
                continue
            drafts = drafter.propose(sequence.output, min(budget, _room(sequence)), token_cost)
            if drafts:
                found[sequence] = drafts
                budget -= len(drafts)
                expected += drafter.expects(len(drafts))
        drafted = sum(map(len, found.values()))
        if cost is None or self._trust * expected < GAIN * (cost.step + token_cost * drafted):
            return {}
        self._expected = expected
        return found

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        counts = self._counts
        self._counts = DraftCounts(counts.sequences + 1, counts.drafted + drafted, counts.accepted + accepted)
        _drafter(sequence).record(drafted, accepted)

    def end_step(self, schedule: Schedule, drafted: int, seconds: float) -> DraftCounts:
        """What was recorded since the step before. `drafted`: tokens of this one, which took so long."""
        batch_size = len(schedule.generation)
        # What drafts cost is learned where some may come, so that other steps do not pay for it.
        if batch_size <= self._max_batch_size and not schedule.context and any(map(_asks, schedule.generation)):
            self.cost.record(batch_size, drafted, seconds)
        counts, self._counts = self._counts, DraftCounts()
        if drafted:
            self._trust += TRUST_RATE * (counts.accepted / self._expected - self._trust)
        elif self._trust != 1.0:
            # What did not pay is tried again.
            self._trust += FORGETTING * (1 - self._trust)
        return counts


def _asks(sequence: Sequence) -> bool:
    return sequence.request.max_drafts > 0


def _may_draft(sequence: Sequence, cost: float) -> bool:
    return _asks(sequence) and (sequence.drafter is None or sequence.drafter.pays(cost))


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
