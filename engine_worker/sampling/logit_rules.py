"""The logit rules of a sequence, and those of a step: how the tokens so far change the next logits.

Their state is a function of the sequence's tokens alone. New rules that are fed all tokens together are in the same
state as those that were fed step by step, which lets a stream continue on any engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from torch import Tensor

from engine_worker.guided.masks import GuidedSequence, MaskRequest
from engine_worker.sampling.processors import ProcessedRow, Processing
from engine_worker.sampling.rules import (
    BadWords,
    Edits,
    NoRepeatNgrams,
    NoRepeatTokens,
    Penalties,
    PromptTokens,
    Rule,
    index_ngrams,
)
from engine_worker.step import Draw
from sluice.wire.params import SamplingParams

FOLLOWS_NONE = -1
"""In place of a token id: the draw does not follow a token of the previous step."""


class LogitRules:
    """The rules of one sequence, and the tokens that they were fed."""

    def __init__(
        self,
        make_rules: Callable[[], Sequence[Rule]],
        prompt_end: Sequence[int],
        processing: Processing | None = None,
        guide: GuidedSequence | None = None,
    ) -> None:
        """`make_rules`: creates the rules, in their state after the prompt. `prompt_end`: the last tokens of the
        prompt, as many as any rule reads."""
        self.processing = processing
        self.guide = guide
        """Its masks are requested for all draws of a step together; see `StepRules.guided`."""
        self._make_rules = make_rules
        self._rules = make_rules()
        self._tokens = list(prompt_end)
        self._num_prompt = len(self._tokens)
        self.only_guided = guide is not None and processing is None and not self._rules
        """Whether only the guide worker follows the tokens, so that these rules need not be fed."""

    @property
    def num_fed(self) -> int:
        """Number of output tokens that were fed."""
        return len(self._tokens) - self._num_prompt

    def fork(self) -> "LogitRules":
        """A copy; only for sequences without processors or a guide. Takes as long as feeding all tokens again."""
        forked = LogitRules(self._make_rules, self._tokens[: self._num_prompt])
        for token in self._tokens[self._num_prompt :]:
            forked.feed(token)
        return forked

    def feed(self, token: int) -> None:
        self._tokens.append(token)
        for rule in self._rules:
            rule.feed(self._tokens)
        if self.processing is not None:
            self.processing.tokens.append(token)

    def truncate(self, size: int) -> None:
        """Roll back to the first `size` output tokens."""
        while self.num_fed > size:
            for rule in self._rules:
                rule.undo(self._tokens)
            self._tokens.pop()
            if self.processing is not None:
                # Not `pop`: the user's processor may have emptied the list.
                del self.processing.tokens[-1:]

    def edits(self) -> Edits:
        """Edits of the logits for the next token."""
        edits = Edits()
        for rule in self._rules:
            rule.edit(self._tokens, edits)
        return edits


def build_logit_rules(
    sampling: SamplingParams,
    prompt: Sequence[int],
    processing: Sequence[Processing | None] = (None,),
    vocab_size: float = inf,
    guides: Sequence[GuidedSequence] = (),
) -> list[LogitRules | None]:
    """The rules of each sequence of `processing`; None if no parameter needs any. They share their data of the prompt.

    `vocab_size`: bad words with ids from there on, which a tokenizer may have, are ignored because the model cannot
    sample them. Ids of virtual tokens in the prompt also start there; rules skip them, but processors see them.
    `guides`: one for each sequence, or empty.
    """
    size = sampling.no_repeat_ngram_size
    words = [word for word in sampling.bad_words if max(word) < vocab_size]
    if not (sampling.penalized or size or words or sampling.logits_processors or guides):
        return [None] * len(processing)
    reads_prompt = sampling.repetition_penalty != 1.0 or size == 1
    seen = PromptTokens([token for token in prompt if token < vocab_size] if reads_prompt else ())
    ngrams = index_ngrams(prompt, size, vocab_size) if size > 1 else {}
    bad_words = [BadWords(words)] if words else []
    longest = max(size, *map(len, words), 1)

    def make_rules() -> list[Rule]:
        rules: list[Rule] = [*bad_words]
        if size == 1:
            rules.append(NoRepeatTokens(seen))
        elif size:
            rules.append(NoRepeatNgrams(size, ngrams))
        if sampling.penalized:
            rules.append(Penalties(sampling, seen))
        return rules

    guide_of: Sequence[GuidedSequence | None] = guides or [None] * len(processing)
    ends = zip(processing, guide_of, strict=True)
    return [LogitRules(make_rules, prompt[-longest:], each, guide) for each, guide in ends]


class DrawRules(NamedTuple):
    """The rules of one draw, and the tokens to feed them."""

    draw: int
    """Index in the step."""
    rules: LogitRules
    output: Sequence[int]
    known: int
    """Length of `output` when the step was planned: it may have grown since."""
    follows: int | None
    """Draw of the previous step that samples the token after the `known` ones; None: all tokens are known."""
    drafted: Sequence[int]
    """Draft tokens after these."""
    may_end: bool
    """Whether the ids that end the sequence may be sampled."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules of a step's draws, in the order of the draws."""

    draws: tuple[DrawRules, ...]
    fed: tuple[DrawRules, ...]
    """Draws whose rules must be fed tokens: all but those with only a guide, which the guide worker advances."""

    @staticmethod
    def of(draws: Sequence[Draw], follows: Mapping[int, int]) -> "StepRules | None":
        """None if no draw has rules."""
        draw_rules = tuple(
            DrawRules(i, draw.rules, draw.output, len(draw.output), follows.get(i), draw.drafted, not draw.banned)
            for i, draw in enumerate(draws)
            if isinstance(draw.rules, LogitRules)
        )
        if not draw_rules:
            return None
        return StepRules(draw_rules, tuple([draw for draw in draw_rules if not draw.rules.only_guided]))

    @property
    def is_guided(self) -> bool:
        return any(rules.guide is not None for _, rules, *_ in self.draws)

    def guided(self, previous_tokens: Sequence[int] | None) -> dict[int, MaskRequest]:
        """Requests for masks, by draw. `previous_tokens`: see `advanced`."""
        requests = {}
        for draw, rules, output, known, follows, drafted, may_end in self.draws:
            if rules.guide is not None:
                followed = () if follows is None or previous_tokens is None else (previous_tokens[follows],)
                requests[draw] = MaskRequest(rules.guide, output, known, (*followed, *drafted), may_end)
        return requests

    def draws_with_processors(self) -> list[int]:
        return [draw for draw, rules, *_ in self.draws if rules.processing is not None]

    def processed(self, logits: Tensor) -> list[ProcessedRow]:
        """logits [P, vocab]: a row for each of `draws_with_processors`."""
        processed = [(draw, rules.processing) for draw, rules, *_ in self.draws if rules.processing is not None]
        return [ProcessedRow(draw, row, processing) for (draw, processing), row in zip(processed, logits, strict=True)]

    def followed(self, previous_tokens: Sequence[int] | None) -> list[int]:
        """For each of `draws_with_processors` the token of the previous step that it follows, or FOLLOWS_NONE.
        `previous_tokens`: see `advanced`."""
        return [
            FOLLOWS_NONE if follows is None or previous_tokens is None else previous_tokens[follows]
            for _, rules, _, _, follows, *_ in self.draws
            if rules.processing is not None
        ]

    @contextmanager
    def advanced(self, previous_tokens: Sequence[int] | None) -> Iterator[dict[int, Edits]]:
        """Feed the rules the tokens before their draws, and yield the edits of draws that have any, by draw; at the
        end of the body, roll back the tokens in flight. `previous_tokens`: tokens of the previous step; None if it
        failed, which makes the results of draws that follow it meaningless."""
        edits = {}
        for draw, rules, output, known, follows, drafted, _ in self.fed:
            for token in output[rules.num_fed : known]:
                rules.feed(token)
            if follows is not None and previous_tokens is not None:
                rules.feed(previous_tokens[follows])
            # The draws of a sequence come in order, each with one more draft token.
            for token in drafted[rules.num_fed - known :]:
                rules.feed(token)
            if edit := rules.edits():
                edits[draw] = edit
        try:
            yield edits
        finally:
            # The followed token is not final: the step that samples it can still turn out to have failed.
            for _, rules, _, known, *_ in self.fed:
                rules.truncate(known)
