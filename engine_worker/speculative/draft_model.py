"""Guesses by the draft model: a second, smaller model that computes the same sequences in the same blocks.

It computes only what it needs to guess. What it has computed of a sequence is counted
(`Sequence.num_draft_computed`, `Stored.drafted`), and it computes the rest before its next guess. A wrong count would
make guesses worse and change no token.
"""

from collections import abc
from collections.abc import Callable, Mapping

from msgspec.structs import replace
from structlog.stdlib import BoundLogger

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.protocol import Runner
from engine_worker.sequence import Sequence
from engine_worker.step import Draw, Drawn, Slice

MAX_FAILURES = 3
"""In a row, after which it is not asked again."""
NEWEST = 4
"""A sequence with more tokens than so many to compute is behind."""

DrawAfter = Callable[[Sequence, abc.Sequence[int]], Draw]
"""The draw of a sequence that follows its known tokens and these guesses."""


class DraftModel:
    def __init__(
        self, runner: Runner, cache: KvCacheManager, max_tokens_per_step: int, draw_after: DrawAfter, log: BoundLogger
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._max_tokens_per_step = max_tokens_per_step
        self._draw_after = draw_after
        self._log = log
        self._context = runner.draft_context or 0
        self._failures = 0
        self._ends: dict[Sequence, int] = {}
        """Of those with guesses in the latest step: what it has computed of each, guesses included."""
        self.was_behind = False
        """Whether the latest guesses took longer because it had more to compute than the newest tokens."""

    def room(self, sequence: Sequence) -> int:
        """Tokens that it can guess."""
        if self._failures >= MAX_FAILURES or not self._cache.keeps_drafted(sequence):
            return 0
        if sequence.request.virtual is not None:
            # Rows of prompt tables are embeddings of the model that it drafts for.
            return 0
        return self._context - sequence.num_tokens

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """At most so many guesses for each; none for those of which it has still to compute more. Sequences must have
        room in their blocks for the guesses, and no unknown token. Raises DeviceLostError."""
        self.was_behind = False
        self._ends.clear()
        try:
            found = self._guess(wanted)
        except Exception:  # noqa: BLE001 - without guesses the sequences get the same tokens
            self._failures += 1
            names = sorted({sequence.request.spec.name for sequence in wanted})
            self._log.exception("draft_model_failed", requests=names, gave_up=self._failures >= MAX_FAILURES)
            self._runner.check()
            return {}
        self._failures = 0
        return found

    def commit(self, sequence: Sequence) -> None:
        """The draws behind its guesses were committed."""
        end = self._ends.pop(sequence, None)
        if end is not None:
            self._cache.commit_drafted(sequence, end)

    def _guess(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        found: dict[Sequence, list[int]] = {}
        guessing = self._first_guesses(wanted, found)
        while guessing:
            slices = [self._next_slice(sequence, found[sequence]) for sequence in guessing]
            drawn = dict(zip(guessing, self._runner.draft(slices), strict=True))
            for sequence in guessing:
                self._ends[sequence] += 1
            guessing = [sequence for sequence in guessing if self._add_guess(sequence, drawn[sequence], wanted, found)]
        return {sequence: guesses for sequence, guesses in found.items() if guesses}

    def _first_guesses(self, wanted: Mapping[Sequence, int], found: dict[Sequence, list[int]]) -> list[Sequence]:
        """Compute what has not been computed, as much as fits a step; those that go on guessing."""
        left, ends, slices = self._max_tokens_per_step, {}, []
        for sequence in wanted:
            # The newest token always: its logits are needed.
            start = min(sequence.num_draft_computed, sequence.num_tokens - 1)
            end = min(sequence.num_tokens, start + left)
            if start < end:
                left -= end - start
                ends[sequence] = end
                self.was_behind |= end - start > NEWEST
                slices.append(self._slice(sequence, start, end))
        drawn = iter(self._runner.draft(slices))
        guessing = []
        for sequence, end in ends.items():
            self._cache.commit_drafted(sequence, end)
            if end == sequence.num_tokens:
                found[sequence], self._ends[sequence] = [], end
                if self._add_guess(sequence, next(drawn), wanted, found):
                    guessing.append(sequence)
        return guessing

    def _slice(self, sequence: Sequence, start: int, end: int) -> Slice:
        draws = (self._draw(sequence, ()),) if end == sequence.num_tokens else ()
        return Slice(sequence.tokens_between(start, end), start, sequence.blocks, draws)

    def _next_slice(self, sequence: Sequence, guesses: list[int]) -> Slice:
        start, draws = sequence.num_tokens + len(guesses) - 1, (self._draw(sequence, guesses),)
        return Slice(guesses[-1:], start, sequence.blocks, draws)

    def _draw(self, sequence: Sequence, guesses: abc.Sequence[int]) -> Draw:
        draw = self._draw_after(sequence, guesses)
        if draw.sampling.logprobs is None:
            return draw
        return replace(draw, sampling=replace(draw.sampling, logprobs=None))

    def _add_guess(
        self, sequence: Sequence, drawn: Drawn, wanted: Mapping[Sequence, int], found: Mapping[Sequence, list[int]]
    ) -> bool:
        """Returns whether another one should follow."""
        if not drawn.drew:
            return False
        found[sequence].append(drawn.token)
        return len(found[sequence]) < wanted[sequence] and drawn.token not in sequence.request.stops
