"""The masks of a step: asked for as early as possible, and collected when the logits are there.

The guide worker's matchers follow from the tokens. If it dies, a new one gets all of them, and the sequence whose
mask it was computing ends if that was the cause.
"""

import signal
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.guided.faults import RefusedGuides, lost, too_complex, wrong_tokens
from engine_worker.guided.memory import COMPILING, SLOT
from engine_worker.guided.messages import AskMasks, Key, MasksReady, Row, RowResult, receive, send
from engine_worker.guided.processes import GuideProcesses, GuidesLostError, WorkerLink
from sluice.ring.errors import Fault
from sluice.ring.params import Guide

MAX_HANGS = 2
"""Of a step, after which its guided sequences end."""
OWN_DEATHS = frozenset({signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS})
"""Signals that only what the process computed can have caused: its timer, and a stack that overflowed."""
MAX_DEATHS = 3
"""In a row, at a mask of the same guide, after which it counts as their cause; and of a step in all."""
NOTHING_ALLOWED = np.zeros((0, 0), np.uint32)
GONE = lost("its masks are gone")


class GuidedSequence:
    """What one sequence has to match. Its matcher is in the guide worker, until this object is gone."""

    def __init__(self, number: int, key: Key, guide: Guide, ends: Sequence[int], released: deque[int]) -> None:
        """`ends`: ids that end it."""
        self.number = number
        self.key = key
        self.guide = guide
        self.ends = tuple(ends)
        self.final = 0
        """Output tokens that the worker has and that will not change."""
        self.tail: list[int] = []
        """Tokens that it has after these: promised and drafted ones."""
        self._released = released

    def __del__(self) -> None:
        self._released.append(self.number)


class Asked(msgspec.Struct, frozen=True, eq=False):
    """A draw of a guided sequence."""

    sequence: GuidedSequence
    output: Sequence[int]
    known: int
    """Length of `output` when the step was planned."""
    more: Sequence[int]
    """Tokens after these that may turn out to be others."""
    may_end: bool
    """False: min_tokens forbids the ids that end it."""

    def tokens(self) -> list[int]:
        return [*self.output[: self.known], *self.more]


class StepMasks(NamedTuple):
    """What the draws asked for got, by index."""

    allowed: NDArray[np.uint32]
    """[asked, words], one bit per token id; valid until masks are asked for again."""
    faults: Mapping[int, Fault]
    complete: Sequence[int]
    """Those behind which nothing more can follow, with no end left to draw."""
    unread: Sequence[int]
    """Those after a draft that will not be drawn, or after a token that ended the sequence."""
    later: Sequence[int]
    """Those of guides that a new worker has not compiled yet: `Guides.prepare` has it do so."""


def take_all(numbers: deque[int]) -> list[int]:
    """Both threads take from it."""
    found: list[int] = []
    with suppress(IndexError):
        while True:
            found.append(numbers.popleft())
    return found


class Masks:
    """Called in the thread that computes steps."""

    def __init__(
        self,
        processes: GuideProcesses,
        refused_guides: RefusedGuides,
        eos_token_ids: Sequence[int],
        released: deque[int],
    ) -> None:
        self._processes = processes
        self._refused_guides = refused_guides
        self._eos = tuple(eos_token_ids)
        self._released = released
        self._link: WorkerLink | None = None
        self._waiting: dict[int, Asked] = {}
        """By slot: rows that were asked for and have no result."""
        self._unusual: dict[int, RowResult] = {}
        """Results of other rows, unless they are those of most: a mask."""
        self._faults: dict[int, Fault] = {}
        self._asked: Sequence[Asked] = ()
        self._num_deaths = 0
        self._num_hangs = 0
        self._suspect: tuple[Key, int] | None = None
        """The guide at whose mask the worker died last, and how often in a row."""

    def ask(self, asked: Sequence[Asked]) -> None:
        """For the masks of a step's draws; the worker computes them meanwhile."""
        if self._waiting:
            # A step failed after it had asked.
            self._wait()
        self._asked, self._unusual, self._faults = asked, {}, {}
        self._waiting = dict(enumerate(asked))
        self._num_deaths = self._num_hangs = 0
        try:
            if self._link is None:
                _, self._link = self._processes.worker()
            self._send(self._link, [_row(slot, each) for slot, each in enumerate(asked)])
        except GuidesLostError as error:
            self._give_up(str(error))

    def collect(self) -> StepMasks:
        self._wait()
        # Not kept: the worker releases a sequence once nothing here refers to it.
        asked, self._asked = self._asked, ()
        if self._link is None:
            return StepMasks(NOTHING_ALLOWED, {**dict.fromkeys(range(len(asked)), GONE), **self._faults}, (), (), ())
        complete, unread, later, faults = [], [], [], dict(self._faults)
        for slot, result in self._unusual.items():
            fault = self._fault(asked[slot], result)
            if fault is not None:
                faults[slot] = fault
            elif result.complete:
                complete.append(slot)
            elif result.later:
                later.append(slot)
            else:
                unread.append(slot)
        return StepMasks(self._link.memory.masks[: len(asked)], faults, complete, unread, later)

    def _wait(self) -> None:
        while self._waiting and self._link is not None:
            try:
                unusual = receive(self._link.steps, MasksReady).unusual
            except (EOFError, OSError) as error:
                # The socket's own time limit has passed.
                self._num_hangs += isinstance(error, BlockingIOError)
                self._recover(self._link)
                continue
            unknown = [slot for slot, result in unusual.items() if not result.known]
            self._waiting = {slot: self._waiting[slot] for slot in unknown}
            self._unusual |= {slot: result for slot, result in unusual.items() if result.known}
            if unknown:
                self._send(self._link, [_whole_row(slot, self._waiting[slot]) for slot in unknown])
        self._suspect = None if not self._num_deaths else self._suspect

    def _send(self, link: WorkerLink, rows: list[Row]) -> None:
        link.memory.reach(len(self._asked))
        # If the worker has died or hangs, `collect` notices.
        with suppress(OSError):
            send(link.steps, AskMasks(rows, link.memory.num_slots, self._eos, take_all(self._released)))

    def _recover(self, ended: WorkerLink) -> None:
        slot, compiling = int(ended.memory.header[SLOT]), ended.memory.header[COMPILING] == 1
        self._num_deaths += 1
        try:
            status, self._link = self._processes.worker(lost=ended)
            self._judge(slot, status, compiling=compiling)
            if self._num_hangs >= MAX_HANGS:
                raise GuidesLostError("the guide worker does not answer")
            if self._num_deaths > MAX_DEATHS + len(self._asked):
                raise GuidesLostError(f"the guide worker has died {self._num_deaths} times in one step")
            # The masks that the former worker had answered are in its memory.
            self._waiting = {each: asked for each, asked in enumerate(self._asked) if each not in self._faults}
            self._unusual = {}
            if self._waiting:
                self._send(self._link, [_whole_row(each, self._waiting[each]) for each in self._by_suspicion()])
        except GuidesLostError as error:
            self._give_up(str(error))

    def _by_suspicion(self) -> list[int]:
        """Slots that wait. The suspect first: in a new worker it then has all of the memory for itself."""
        suspect = None if self._suspect is None else self._suspect[0]
        return sorted(self._waiting, key=lambda slot: (self._waiting[slot].sequence.key != suspect, slot))

    def _judge(self, slot: int, status: int, *, compiling: bool) -> None:
        """End the sequence at whose mask the worker died, if that is why it died."""
        culprit = self._waiting.get(slot)
        if culprit is None:
            return
        key, count = culprit.sequence.key, 1
        if self._suspect is not None and self._suspect[0] == key:
            count += self._suspect[1]
        self._suspect = key, count
        # Its timer also counts the thread that compiles, and something else may have killed it.
        if (status in OWN_DEATHS and not compiling) or count >= MAX_DEATHS:
            fault = too_complex(culprit.sequence.guide, status, self._refused_guides.limits, compiling=False)
            if not culprit.more:
                self._refused_guides.refuse(key, fault)
            # Masks after fewer drafted tokens may be found, and all drafts behind those be wrong.
            for each in [s for s, asked in self._waiting.items() if asked.sequence is culprit.sequence and s >= slot]:
                del self._waiting[each]
                self._faults[each] = fault
            self._suspect = None

    def _give_up(self, reason: str) -> None:
        self._link = None
        self._faults |= dict.fromkeys(self._waiting, lost(reason))
        self._waiting = {}

    def _fault(self, asked: Asked, result: RowResult) -> Fault | None:
        if result.error:
            return too_complex(asked.sequence.guide, 0, self._refused_guides.limits, reason=result.error)
        if result.later:
            return None
        if result.consumed < asked.known:
            return wrong_tokens(asked.sequence.guide, result.consumed)
        return None


def _row(slot: int, asked: Asked) -> Row:
    """With the tokens that the worker does not know yet."""
    sequence = asked.sequence
    if asked.known < sequence.final:
        # A draw before others that were made: it never is, but a mask of other tokens would show nowhere.
        sequence.final, sequence.tail = 0, []
        row = _whole_row(slot, asked)
        sequence.tail = row.tokens
        return row
    new, sent = [*asked.output[sequence.final : asked.known], *asked.more], sequence.tail
    same = 0
    while same < min(len(new), len(sent)) and new[same] == sent[same]:
        same += 1
    row = Row(slot, sequence.number, sequence.final + same, new[same:], sequence.key, sequence.ends, asked.may_end)
    sequence.tail = new[asked.known - sequence.final :]
    sequence.final = asked.known
    return row


def _whole_row(slot: int, asked: Asked) -> Row:
    sequence = asked.sequence
    ends, may_end = sequence.ends, asked.may_end
    return Row(slot, sequence.number, 0, asked.tokens(), sequence.key, ends, may_end, sequence.guide)
