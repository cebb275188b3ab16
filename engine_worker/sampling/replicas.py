"""Logits processors on every rank: what rank 0 sends the others of a step, and how they call them.

Each rank keeps the tokens of the sequences that have processors, so a step sends what is new. Results other than rank
0's are dropped.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from engine_worker.guided.masks import take_all
from engine_worker.sampling.processors import ProcessedRow, Processors, run_processors
from engine_worker.sampling.program import Processing, Program
from engine_worker.sampling.programs import FOLLOWS_NONE, StepPrograms


class ReplicatedRow(NamedTuple):
    """A processed row, as far as it is known when the step is launched."""

    sequence: int
    keep: int
    """Of the tokens that the rank has of this sequence, the first so many are right."""
    tokens: Sequence[int]
    """Those after these."""
    begins: Processing | None = None
    """With the tokens of the prompt; only in the first row of a sequence."""


class ReplicatedStep(NamedTuple):
    rows: Sequence[ReplicatedRow]
    """In the order of `SamplingPlan.processed_rows`."""
    released: Sequence[int] = ()
    """Sequences that have ended."""


class _Sent:
    """What the other ranks have of one sequence; its number is released with this object."""

    def __init__(self, number: int, num_prompt: int, released: deque[int]) -> None:
        self.number = number
        self.num_prompt = num_prompt
        self.num_output = 0
        self._released = released

    def __del__(self) -> None:
        self._released.append(self.number)


class ReplicatedSequences:
    """On rank 0, in the thread that launches steps."""

    def __init__(self) -> None:
        self._sent: WeakKeyDictionary[Program, _Sent] = WeakKeyDictionary()
        self._numbers = count()
        self._released: deque[int] = deque()

    def step(self, programs: StepPrograms | None) -> ReplicatedStep | None:
        """What the other ranks need for a step with these programs; None: nothing."""
        rows = []
        for _, program, output, known, *_ in () if programs is None else programs.draws:
            if program.processing is not None:
                rows.append(self._row(program, program.processing, output, known))
        released = take_all(self._released)
        return ReplicatedStep(rows, released) if rows or released else None

    def _row(self, program: Program, processing: Processing, output: Sequence[int], known: int) -> ReplicatedRow:
        sent = self._sent.get(program)
        begins = None
        if sent is None:
            # No step has fed this program yet, so it has the prompt alone.
            begins = processing._replace(tokens=list(processing.tokens))
            sent = self._sent[program] = _Sent(next(self._numbers), len(begins.tokens), self._released)
        same = min(sent.num_output, known)
        sent.num_output = known
        return ReplicatedRow(sent.number, sent.num_prompt + same, output[same:known], begins)


class ReplicatedProcessors:
    """On another rank."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors
        self._sequences: dict[int, Processing] = {}

    def run(self, step: ReplicatedStep, logits: Tensor, followed: Sequence[int]) -> None:
        """logits [P, vocab] float32, which are changed; followed [P]: see `StepPrograms.followed`."""
        for number in step.released:
            self._sequences.pop(number, None)
        rows = []
        for i, (row, token) in enumerate(zip(step.rows, followed, strict=True)):
            if row.begins is not None:
                self._sequences[row.sequence] = row.begins
            its = self._sequences[row.sequence]
            its.tokens[row.keep :] = row.tokens
            if token != FOLLOWS_NONE:
                its.tokens.append(token)
            rows.append(ProcessedRow(i, logits[i], its))
        if not rows:
            return
        for i in run_processors(self._processors, rows):
            # On rank 0 the sequence ends where one raises; here none is called for it any more.
            number = step.rows[i].sequence
            self._sequences[number] = self._sequences[number]._replace(names=())
