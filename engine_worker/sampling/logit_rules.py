"""The logit rules of a sequence: how the tokens so far change the next logits.

Their state is a function of the sequence's tokens alone. New rules that are fed all tokens together are in the same
state as those that were fed step by step, which lets a stream continue on any engine.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from engine_worker.guided.masks import GuidedSequence
from engine_worker.sampling.bans import BadWords, NoRepeatNgrams, NoRepeatTokens, index_ngrams
from engine_worker.sampling.penalties import Penalties
from engine_worker.sampling.rules import Edits, Rule
from engine_worker.sampling.seen import PromptTokens
from sluice.wire.params import SamplingParams
from sluice.wire.requests import Submit


class Processing(NamedTuple):
    """Arguments for the logits processors of one sequence; see `processors`."""

    names: tuple[str, ...]
    request_id: str
    client_id: int | None
    tokens: list[int]
    """Prompt and output."""

    @staticmethod
    def of(spec: Submit) -> "list[Processing | None]":
        """One per sequence; None for sequences that ended in an earlier attempt, or if there are no processors."""
        names = spec.sampling.logits_processors
        if not names:
            return [None] * spec.n
        ids = [spec.name] if spec.n == 1 else [f"{spec.name}/{i}" for i in range(spec.n)]
        return [
            None if index in spec.ended else Processing(names, request_id, spec.client_id, list(spec.prompt))
            for index, request_id in enumerate(ids)
        ]


class LogitRules:
    """The rules of one sequence, and the tokens that they were fed."""

    def __init__(
        self,
        make_rules: Callable[[], Sequence[Rule]],
        prompt_end: Sequence[int],
        processing: Processing | None = None,
        guide: GuidedSequence | None = None,
    ) -> None:
        """`make_rules`: in the state after the prompt. `prompt_end`: the last tokens of the prompt, as
        many as any rule reads."""
        self.processing = processing
        self.guide = guide
        """Its masks are requested for all draws of a step together; see `step_rules`."""
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
        """A copy; only for sequences without processors and guide. Takes as long as feeding all tokens again."""
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
