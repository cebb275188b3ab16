"""When the draft model guesses: if that should bring more tokens than it costs."""

from collections import abc
from collections.abc import Mapping

from engine_worker.sequence import Sequence
from engine_worker.speculative.draft_model import DraftModel
from engine_worker.speculative.drafter import Drafter
from engine_worker.speculative.gain import Gain


class ModelDrafting:
    """A drafted token costs the draft model's time, too: these drafts have costs and accuracies of their own."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.gain = Gain()
        self.asked = False
        """Whether the draft model has computed for the latest step."""

    def wants(self, sequence: Sequence, batch_size: int) -> bool:
        """Whether it may guess for the sequence once its newest token is known."""
        cost, drafter = self.gain.cost.of(batch_size), sequence.drafter
        if cost is None or self._model.room(sequence) < 1:
            return False
        return drafter is None or drafter.model_pace is None or drafter.model_pace.length(cost.token) > 0

    def propose(
        self, asking: Mapping[Sequence, Drafter], batch_size: int, budget: int, *, idle: bool
    ) -> dict[Sequence, abc.Sequence[int]]:
        """Together at most `budget` tokens, and none unless `idle`."""
        self.asked = False
        cost = self.gain.cost.of(batch_size)
        if cost is None:
            return {}
        lengths = self._lengths(asking, cost.token, budget)
        expected = sum(_expects(asking[sequence], length) for sequence, length in lengths.items())
        if not idle or not lengths or not self.gain.pays(cost, expected, sum(lengths.values())):
            return {}
        self.asked = True
        found = self._model.propose(lengths)
        for sequence in found:
            asking[sequence].by_model = True
        self.gain.expect(sum(_expects(asking[sequence], len(guesses)) for sequence, guesses in found.items()))
        return dict(found)

    def record(self, sequence: Sequence, accepted: int) -> None:
        """The draws behind its guesses were committed."""
        self._model.commit(sequence)
        self.gain.record(accepted)

    def record_time(self, batch_size: int, drafted: int, seconds: float) -> None:
        """Of a step that computed nothing else."""
        useful = drafted > 0 and not self._model.was_behind
        if useful if self.asked else not drafted:
            self.gain.cost.record(batch_size, drafted, seconds)

    def _lengths(self, asking: Mapping[Sequence, Drafter], token_cost: float, budget: int) -> dict[Sequence, int]:
        lengths = {}
        for sequence, drafter in asking.items():
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
    """Tokens that fit its blocks and its length, if its newest token is known; else 0."""
    if sequence.num_promised or sequence.num_inflight:
        return 0
    # The draw after the last guess is a token, too.
    return min(sequence.num_placed - sequence.num_tokens, sequence.request.max_tokens - sequence.num_tokens - 1)


def _expects(drafter: Drafter, drafted: int) -> float:
    """How many of the draft model's guesses are accepted."""
    return 0.0 if drafter.model_pace is None else drafter.model_pace.expects(drafted)
