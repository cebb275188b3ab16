"""What the tokens of a sequence so far do to its next logits.

A program is a function of the sequence's tokens and grows with them. A new one that is fed all of them at once is in
the same state as one that was fed step by step, which lets a stream continue on any engine.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from engine_worker.guided.masks import GuidedSequence
from engine_worker.sampling.bans import BadWords, NoRepeatNgrams, NoRepeatTokens, index_ngrams
from engine_worker.sampling.penalties import Penalties
from engine_worker.sampling.rules import Edits, Rule
from engine_worker.sampling.seen import PromptTokens
from sluice.ring.params import SamplingParams
from sluice.ring.wire import Submit


class Processing(NamedTuple):
    """What the logits processors of one sequence are called with; see `processors`."""

    names: tuple[str, ...]
    request_id: str
    client_id: int | None
    tokens: list[int]
    """Prompt and output."""

    @staticmethod
    def of(spec: Submit) -> "list[Processing | None]":
        """By sequence; None for those that ended in an earlier attempt."""
        names = spec.sampling.logits_processors
        if not names:
            return [None] * spec.n
        ids = [spec.name] if spec.n == 1 else [f"{spec.name}/{i}" for i in range(spec.n)]
        return [
            None if index in spec.ended else Processing(names, request_id, spec.client_id, list(spec.prompt))
            for index, request_id in enumerate(ids)
        ]


class Program:
    """The rules of one sequence, and the tokens that they were fed."""

    def __init__(
        self,
        rules: Callable[[], Sequence[Rule]],
        prompt_end: Sequence[int],
        processing: Processing | None = None,
        guide: GuidedSequence | None = None,
    ) -> None:
        """`rules`: makes them, as they stand after the prompt. `prompt_end`: as many of the prompt's last tokens as any
        rule reads."""
        self.processing = processing
        self.guide = guide
        """Asked for all draws of a step together; see `programs`."""
        self._make_rules = rules
        self._rules = rules()
        self._tokens = list(prompt_end)
        self._num_prompt = len(self._tokens)
        self.only_guided = guide is not None and processing is None and not self._rules
        """Whether nothing here depends on the tokens, so that they need not be fed."""

    @property
    def num_fed(self) -> int:
        """Output tokens."""
        return len(self._tokens) - self._num_prompt

    def fork(self) -> "Program":
        """Of a sequence without processors and guide. Takes as long as feeding all tokens again."""
        forked = Program(self._make_rules, self._tokens[: self._num_prompt])
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
        """Back to the first `size` output tokens."""
        while self.num_fed > size:
            for rule in self._rules:
                rule.undo(self._tokens)
            self._tokens.pop()
            if self.processing is not None:
                # Not `pop`: a processor may have emptied it.
                del self.processing.tokens[-1:]

    def edits(self) -> Edits:
        """For the token after those fed."""
        edits = Edits()
        for rule in self._rules:
            rule.edit(self._tokens, edits)
        return edits


def build_programs(
    sampling: SamplingParams,
    prompt: Sequence[int],
    processing: Sequence[Processing | None] = (None,),
    vocab_size: float = inf,
    guides: Sequence[GuidedSequence] = (),
) -> list[Program | None]:
    """One for each of the sequences of `processing`; None if no parameter needs one. They share what they know of the
    prompt. `vocab_size`: words with other tokens, which cannot come, are ignored; a tokenizer may have such tokens.
    Virtual tokens of the prompt, whose ids begin there, count for no rule but processors, which see them. `guides`: one
    for each of them, or none."""
    size = sampling.no_repeat_ngram_size
    words = [word for word in sampling.bad_words if max(word) < vocab_size]
    if not (sampling.penalized or size or words or sampling.logits_processors or guides):
        return [None] * len(processing)
    counts = sampling.repetition_penalty != 1.0 or size == 1
    seen = PromptTokens([token for token in prompt if token < vocab_size] if counts else ())
    ngrams = index_ngrams(prompt, size, vocab_size) if size > 1 else {}
    bad_words = [BadWords(words)] if words else []
    longest = max(size, *map(len, words), 1)

    def rules() -> list[Rule]:
        found: list[Rule] = [*bad_words]
        if size == 1:
            found.append(NoRepeatTokens(seen))
        elif size:
            found.append(NoRepeatNgrams(size, ngrams))
        if sampling.penalized:
            found.append(Penalties(sampling, seen))
        return found

    guide_of: Sequence[GuidedSequence | None] = guides or [None] * len(processing)
    return [Program(rules, prompt[-longest:], each, guide) for each, guide in zip(processing, guide_of, strict=True)]
