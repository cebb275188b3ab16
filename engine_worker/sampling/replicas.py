"""Logits processors on every rank: what rank 0 sends to the other ranks in a step, and how these call the processors.

Each rank keeps the tokens of the sequences that have processors, so a step sends only new ones. Only the results of
rank 0 are used.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from engine_worker.guided.masks import take_all
from engine_worker.sampling.logit_rules import FOLLOWS_NONE, LogitRules, StepRules
from engine_worker.sampling.processors import ProcessedRow, Processing, Processors, run_processors


class ReplicatedRow(NamedTuple):
    """A row with processors, as far as it is known when the step is launched."""

    sequence: int
    keep: int
    """Number of tokens that the rank keeps of this sequence; `tokens` follow them."""
    tokens: Sequence[int]
    begins: Processing | None = None
    """Only in the first row of a sequence: its arguments, with the tokens of the prompt."""


class ReplicatedStep(NamedTuple):
    rows: Sequence[ReplicatedRow]
    """In the order of `SamplingPlan.processed_rows`."""
    released: Sequence[int] = ()
    """Sequences that have ended."""


class _Sent:
    """What the other ranks have received of one sequence. When it is deleted, the sequence's number is released."""

    def __init__(self, number: int, num_prompt: int, released: deque[int]) -> None:
        self.number = number
        self.num_prompt = num_prompt
        self.num_output = 0
        self._released = released

    def __del__(self) -> None:
        self._released.append(self.number)


class ReplicatedSequences:
    """Rank 0's side. Used by the thread that launches steps."""

    def __init__(self) -> None:
        self._sent: WeakKeyDictionary[LogitRules, _Sent] = WeakKeyDictionary()
        self._numbers = count()
        self._released: deque[int] = deque()

    def step(self, step_rules: StepRules | None) -> ReplicatedStep | None:
        """The message to the other ranks for a step with these rules; None if they need nothing."""
        rows = []
        for _, rules, output, known, *_ in () if step_rules is None else step_rules.draws:
            if rules.processing is not None:
                rows.append(self._row(rules, rules.processing, output, known))
        released = take_all(self._released)
        return ReplicatedStep(rows, released) if rows or released else None

    def _row(self, rules: LogitRules, processing: Processing, output: Sequence[int], known: int) -> ReplicatedRow:
        sent = self._sent.get(rules)
        begins = None
        if sent is None:
            # No step has fed these rules yet, so they have only the prompt.
            begins = processing._replace(tokens=list(processing.tokens))
            sent = self._sent[rules] = _Sent(next(self._numbers), len(begins.tokens), self._released)
        same = min(sent.num_output, known)
        sent.num_output = known
        return ReplicatedRow(sent.number, sent.num_prompt + same, output[same:known], begins)


class ReplicatedProcessors:
    """The side of every other rank."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors
        self._sequences: dict[int, Processing] = {}

    def run(self, step: ReplicatedStep, logits: Tensor, followed: Sequence[int]) -> None:
        """Call the processors of a step. logits: [P, vocab] float32, changed in place. followed: [P], see
        `StepRules.followed`."""
        for number in step.released:
            self._sequences.pop(number, None)
        rows = []
        for i, (row, token) in enumerate(zip(step.rows, followed, strict=True)):
            if row.begins is not None:
                self._sequences[row.sequence] = row.begins
            processing = self._sequences[row.sequence]
            processing.tokens[row.keep :] = row.tokens
            if token != FOLLOWS_NONE:
                processing.tokens.append(token)
            rows.append(ProcessedRow(i, logits[i], processing))
        if not rows:
            return
        for i in run_processors(self._processors, rows):
            # On rank 0 the sequence ends if a processor raises; here no processor is called for it any more.
            number = step.rows[i].sequence
            self._sequences[number] = self._sequences[number]._replace(names=())
