"""Decides when the draft model drafts: when its drafts should gain more tokens than they cost."""

from collections import abc
from collections.abc import Mapping

from engine_worker.request import Sequence
from engine_worker.speculative.draft_model import DraftModel
from engine_worker.speculative.drafter import Drafter
from engine_worker.speculative.gain import Gain


class ModelDrafting:
    """The costs and accuracies of these drafts are separate, because they include the draft model's time."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.gain = Gain()
        self.used = False
        """Whether the draft model has computed for the latest step."""

    def may_draft(self, sequence: Sequence, batch_size: int) -> bool:
        """Whether it may draft for the sequence once its newest token is known."""
        cost, drafter = self.gain.cost.of(batch_size), sequence.drafter
        if cost is None or self._model.room(sequence) < 1:
            return False
        return drafter is None or drafter.model_pace is None or drafter.model_pace.length(cost.token) > 0

    def propose(
        self, drafters: Mapping[Sequence, Drafter], batch_size: int, budget: int, *, idle: bool
    ) -> dict[Sequence, abc.Sequence[int]]:
        """The drafts of a step: at most `budget` tokens together, and none unless `idle`."""
        self.used = False
        cost = self.gain.cost.of(batch_size)
        if cost is None:
            return {}
        lengths = self._lengths(drafters, cost.token, budget)
        expected = sum(_expects(drafters[sequence], length) for sequence, length in lengths.items())
        if not idle or not lengths or not self.gain.pays(cost, expected, sum(lengths.values())):
            return {}
        self.used = True
        drafts = self._model.propose(lengths)
        for sequence in drafts:
            drafters[sequence].by_model = True
        self.gain.expect(sum(_expects(drafters[sequence], len(tokens)) for sequence, tokens in drafts.items()))
        return dict(drafts)

    def record(self, sequence: Sequence, accepted: int) -> None:
        """Record the result of a sequence's draft, after its step was committed."""
        self._model.commit(sequence)
        self.gain.record(accepted)

    def record_time(self, batch_size: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step without context. `drafted`: its draft tokens."""
        # Steps in which the draft model had to catch up, or which have other drafts, say nothing about the cost.
        representative = drafted > 0 and not self._model.was_behind if self.used else not drafted
        if representative:
            self.gain.cost.record(batch_size, drafted, seconds)

    def _lengths(self, drafters: Mapping[Sequence, Drafter], token_cost: float, budget: int) -> dict[Sequence, int]:
        lengths = {}
        for sequence, drafter in drafters.items():
            pace = drafter.model_pace
            if pace is None or drafter.follows(sequence.output):
                continue
            length = pace.length(token_cost)
            if not length:
                pace.forget()
            length = min(length, budget, room_of(sequence), self._model.room(sequence))
            if length > 0:
                lengths[sequence] = length
                budget -= length
        return lengths


def room_of(sequence: Sequence) -> int:
    """Draft tokens that fit in its blocks and within max_tokens; 0 unless its newest token is known."""
    if sequence.num_promised or sequence.num_inflight:
        return 0
    # One token is sampled after the last draft token.
    return min(sequence.num_placed - sequence.num_tokens, sequence.request.max_tokens - sequence.num_tokens - 1)


def _expects(drafter: Drafter, drafted: int) -> float:
    """Expected number of accepted tokens of a draft of this length by the draft model."""
    return 0.0 if drafter.model_pace is None else drafter.model_pace.expects(drafted)
