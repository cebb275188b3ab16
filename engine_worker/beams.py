"""The rules of beam search: which beams continue with which tokens, and when a search ends. The same as those of
transformers' `generate`.

Depends on tokens and log-probabilities only, not on sequences or memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sluice.wire.errors import FinishReason
from sluice.wire.params import BeamSearchParams, StopParams
from sluice.wire.rows import TokenLogprob


class Path(NamedTuple):
    """The tokens of a beam, linked from the last to the first, so that beams share common prefixes."""

    parent: "Path | None"
    """None: this is the prompt, and only `total` has a meaning."""
    token: int
    logprob: TokenLogprob
    total: float
    """Sum of the log-probabilities of all tokens."""

    def steps(self) -> "list[Path]":
        """The path after each token, the first token first."""
        return list(self._backwards())[::-1]

    def _backwards(self) -> "Iterator[Path]":
        path = self
        while path.parent is not None:
            yield path
            path = path.parent


class Child(NamedTuple):
    """A beam of the next round."""

    parent: int
    """Index of the beam that this one continues."""
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    path: Path
    score: float
    reason: FinishReason


class _Candidate(NamedTuple):
    score: float
    """Sum of the log-probabilities, plus diversity."""
    parent: int
    rank: int
    """Rank among the next tokens of its parent, from 1."""
    token: int
    logprob: float


ROOT = Path(None, 0, TokenLogprob(0.0, 0, []), 0.0)


class BeamSearch:
    """State of one search. Each call of `advance` is a round: from the candidates of all live beams it computes the
    live beams of the next round. The first round has one beam: the prompt."""

    def __init__(self, params: BeamSearchParams, stopping: StopParams, alternatives: int = 0) -> None:
        """`alternatives`: most likely tokens to report with each token."""
        self.width = params.width
        self.finished: list[Hypothesis] = []
        """The best finished beams so far, at most `width`, the best first."""
        self.ended = False
        """Whether the last round has been computed."""
        self._params = params
        self._stopping = stopping
        self._ends = frozenset(stopping.eos_token_ids + stopping.stop_token_ids)
        self._alternatives = alternatives
        self._live: list[Path] = [ROOT]
        self._length = 0
        """Number of tokens of each live beam."""

    @property
    def num_candidates(self) -> int:
        """Most likely next tokens that each beam must deliver: enough for `width` tokens that do not end it."""
        return max(self.width + max(self.width, len(self._ends)), self._alternatives)

    def advance(self, best: Sequence[Sequence[tuple[int, float]]]) -> list[Child]:
        """Compute a round. `best`: for each live beam, in order, its most likely next tokens with their
        log-probabilities, the best first. Returns the beams of the next round, the best first; none if the search has
        ended."""
        self._length += 1
        children: list[Child] = []
        paths: list[Path] = []
        for place, candidate in enumerate(self._ranked(best)):
            reason = self._reason(candidate.token)
            if reason is FinishReason.RUNNING and len(paths) < self.width:
                children.append(Child(candidate.parent, candidate.token))
                paths.append(self._extended(candidate, best))
            # An end counts only among the first `width` candidates: later ones only replace candidates that end.
            elif reason is not FinishReason.RUNNING and place < self.width:
                self._finish(self._extended(candidate, best), reason)
        del self.finished[self.width :]
        self.ended = not paths or self._is_decided(max(path.total for path in paths))
        self._live = paths
        return [] if self.ended else children

    def _ranked(self, best: Sequence[Sequence[tuple[int, float]]]) -> list[_Candidate]:
        candidates = [
            _Candidate(path.total + logprob + self._params.diversity_rate * parent, parent, rank, token, logprob)
            for parent, (path, tokens) in enumerate(zip(self._live, best, strict=True))
            for rank, (token, logprob) in enumerate(tokens, 1)
            # Neither -inf nor NaN.
            if logprob > -float("inf")
        ]
        return sorted(candidates, key=lambda candidate: -candidate.score)

    def _extended(self, candidate: _Candidate, best: Sequence[Sequence[tuple[int, float]]]) -> Path:
        parent = self._live[candidate.parent]
        top = list(best[candidate.parent][: self._alternatives])
        logprob = TokenLogprob(candidate.logprob, candidate.rank, top)
        return Path(parent, candidate.token, logprob, parent.total + candidate.logprob)

    def _reason(self, token: int) -> FinishReason:
        return self._stopping.finish_reason(token, self._length)

    def _finish(self, path: Path, reason: FinishReason) -> None:
        self.finished.append(Hypothesis(path, self._score(path.total, self._length), reason))
        # The sort is stable: among equal scores the earlier one comes first.
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)

    def _is_decided(self, best_total: float) -> bool:
        """Whether there are `width` finished beams that no live beam may replace. `best_total`: the highest sum of a
        live beam."""
        if len(self.finished) < self.width:
            return False
        if self._params.early_stopping:
            return True
        # The score is estimated at the current length or, in an exhaustive search, at the length with the best score.
        longest = self._params.exhaustive and self._params.length_penalty > 0
        possible = self._score(best_total, self._stopping.max_tokens if longest else self._length)
        return possible <= self.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self._params.length_penalty)
