"""The masks of a step: requested as early as possible, and collected when the logits have been computed.

A matcher of the guide worker is a function of its sequence's tokens. If the worker dies, a new one receives all tokens
again; the sequence whose mask it was computing ends if that mask was the cause.
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
from engine_worker.guided.messages import ComputeMasks, Key, MasksReady, Row, RowResult, receive, send
from engine_worker.guided.processes import GuideProcesses, GuidesLostError, WorkerLink
from sluice.wire.errors import Fault
from sluice.wire.params import Guide

MAX_HANGS = 2
"""Timeouts of the guide worker in one step, after which the step's guided sequences end."""
OWN_DEATHS = frozenset({signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS})
"""Signals that only the worker's own computation can cause: its CPU timer, and a stack overflow."""
MAX_DEATHS = 3
"""Consecutive deaths at masks of the same guide, after which the guide counts as the cause. Also the deaths that one
step may have beyond one for each of its rows."""
NOTHING_ALLOWED = np.zeros((0, 0), np.uint32)
MASKS_LOST = lost("the guide worker was lost before its masks were read")


class GuidedSequence:
    """A sequence that follows a guide. The guide worker keeps its matcher until this object is deleted."""

    def __init__(self, number: int, key: Key, guide: Guide, ends: Sequence[int], released: deque[int]) -> None:
        """`ends`: ids that end it. `released`: gets `number` when this object is deleted."""
        self.number = number
        self.key = key
        self.guide = guide
        self.ends = tuple(ends)
        self.final = 0
        """Number of known output tokens that the worker has received."""
        self.tail: list[int] = []
        """Tokens after these that the worker has received and that may turn out differently: promised and draft tokens.
        """
        self._released = released

    def __del__(self) -> None:
        self._released.append(self.number)


class MaskRequest(msgspec.Struct, frozen=True, eq=False):
    """Requests the mask for one sampled token of a guided sequence."""

    sequence: GuidedSequence
    output: Sequence[int]
    known: int
    """Length of `output` when the step was planned."""
    more: Sequence[int]
    """Tokens after the known ones that may turn out differently: promised and draft tokens."""
    may_end: bool
    """False if min_tokens forbids the ids that end the sequence."""

    def tokens(self) -> list[int]:
        return [*self.output[: self.known], *self.more]


class StepMasks(NamedTuple):
    """The masks of a step. Requests are named by their index."""

    allowed: NDArray[np.uint32]
    """[requests, words], one bit per token id; valid until masks are requested again. Rows of requests that are named
    below are meaningless."""
    faults: Mapping[int, Fault]
    complete: Sequence[int]
    """Requests whose output is complete: no token can follow, and there is no end id to sample."""
    unread: Sequence[int]
    """Requests whose mask is not needed: they follow a draft token that the guide rejects, or a token that ended the
    sequence."""
    later: Sequence[int]
    """Requests with guides that a new worker has not compiled yet; `Guides.prepare` compiles them."""


def take_all(numbers: deque[int]) -> list[int]:
    """Remove and return all numbers. Two threads may call it at the same time."""
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
        self._waiting: dict[int, MaskRequest] = {}
        """Requests without a result, by slot."""
        self._unusual: dict[int, RowResult] = {}
        """Results other than a mask, by slot."""
        self._faults: dict[int, Fault] = {}
        """Faults of requests whose guide killed the worker, by slot."""
        self._requests: Sequence[MaskRequest] = ()
        self._num_deaths = 0
        self._num_hangs = 0
        self._suspect: tuple[Key, int] | None = None
        """The guide at whose mask the worker died last, and how many times in a row."""

    def request(self, requests: Sequence[MaskRequest]) -> None:
        """Request the masks of a step. The worker computes them until `collect`."""
        if self._waiting:
            # A previous step failed after it had requested masks.
            self._wait()
        self._requests, self._unusual, self._faults = requests, {}, {}
        self._waiting = dict(enumerate(requests))
        self._num_deaths = self._num_hangs = 0
        try:
            if self._link is None:
                _, self._link = self._processes.worker()
            self._send(self._link, [_row(slot, request) for slot, request in enumerate(requests)])
        except GuidesLostError as error:
            self._give_up(str(error))

    def collect(self) -> StepMasks:
        """Wait for the masks of the latest `request`."""
        self._wait()
        # Keep no reference to the sequences: the worker releases a matcher once its sequence is deleted.
        requests, self._requests = self._requests, ()
        if self._link is None:
            faults = {**dict.fromkeys(range(len(requests)), MASKS_LOST), **self._faults}
            return StepMasks(NOTHING_ALLOWED, faults, (), (), ())
        complete, unread, later, faults = [], [], [], dict(self._faults)
        for slot, result in self._unusual.items():
            fault = self._fault(requests[slot], result)
            if fault is not None:
                faults[slot] = fault
            elif result.complete:
                complete.append(slot)
            elif result.later:
                later.append(slot)
            else:
                unread.append(slot)
        return StepMasks(self._link.memory.masks[: len(requests)], faults, complete, unread, later)

    def _wait(self) -> None:
        while self._waiting and self._link is not None:
            try:
                self._link.wait()
                unusual = receive(self._link.steps, MasksReady).unusual
            except (EOFError, OSError) as error:
                # BlockingIOError: the worker was stopped, or HUNG_SECONDS have passed.
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
        link.memory.reach(len(self._requests))
        try:
            send(link.steps, ComputeMasks(rows, link.memory.num_slots, self._eos, take_all(self._released)))
        except OSError:
            # The worker has died, or may have received half a message. `collect` notices.
            link.kill()

    def _recover(self, ended: WorkerLink) -> None:
        """Replace a guide worker that has died or does not answer, and request all masks again."""
        slot, compiling = int(ended.memory.header[SLOT]), ended.memory.header[COMPILING] > 0
        self._num_deaths += 1
        try:
            status, self._link = self._processes.worker(lost=ended)
            self._judge(slot, status, compiling=compiling)
            if self._num_hangs >= MAX_HANGS:
                raise GuidesLostError("the guide worker does not answer")
            if self._num_deaths > MAX_DEATHS + len(self._requests):
                raise GuidesLostError(f"the guide worker has died {self._num_deaths} times in one step")
            # Also those that were answered: their masks are in the memory of the previous worker.
            self._waiting = {i: request for i, request in enumerate(self._requests) if i not in self._faults}
            self._unusual = {}
            if self._waiting:
                self._send(self._link, [_whole_row(i, self._waiting[i]) for i in self._by_suspicion()])
        except GuidesLostError as error:
            self._give_up(str(error))

    def _by_suspicion(self) -> list[int]:
        """Slots of the waiting requests, those of the suspect first: it then has all memory of the new worker to
        itself."""
        suspect = None if self._suspect is None else self._suspect[0]
        return sorted(self._waiting, key=lambda slot: (self._waiting[slot].sequence.key != suspect, slot))

    def _judge(self, slot: int, status: int, *, compiling: bool) -> None:
        """End the sequence at whose mask the worker died, if that mask was the cause. `status`: the signal that ended
        the worker. `compiling`: whether its other threads were compiling guides."""
        culprit = self._waiting.get(slot)
        if culprit is None:
            return
        key, count = culprit.sequence.key, 1
        if self._suspect is not None and self._suspect[0] == key:
            count += self._suspect[1]
        self._suspect = key, count
        # Otherwise the cause may be a guide that was being compiled, or another process that killed the worker.
        if status == signal.SIGPROF or (status in OWN_DEATHS and not compiling) or count >= MAX_DEATHS:
            fault = too_complex(culprit.sequence.guide, status, self._refused_guides.limits, compiling=False)
            if not culprit.more:
                self._refused_guides.refuse(key, fault)
            # Not the masks after fewer draft tokens: they may be computable, and the later draft tokens be rejected.
            same_sequence = [i for i, request in self._waiting.items() if request.sequence is culprit.sequence]
            for i in [i for i in same_sequence if i >= slot]:
                del self._waiting[i]
                self._faults[i] = fault
            self._suspect = None

    def _give_up(self, reason: str) -> None:
        self._link = None
        self._faults |= dict.fromkeys(self._waiting, lost(reason))
        self._waiting = {}

    def _fault(self, request: MaskRequest, result: RowResult) -> Fault | None:
        if result.error:
            return too_complex(request.sequence.guide, 0, self._refused_guides.limits, reason=result.error)
        if result.later:
            return None
        if result.consumed < request.known:
            return wrong_tokens(request.sequence.guide, result.consumed)
        return None


def _row(slot: int, request: MaskRequest) -> Row:
    """A row with only the tokens that the worker has not received."""
    sequence = request.sequence
    if request.known < sequence.final:
        # An earlier position than before. This should not happen, but a mask for the wrong tokens would go unnoticed.
        sequence.final, sequence.tail = 0, []
        row = _whole_row(slot, request)
        sequence.tail = row.tokens
        return row
    new, sent = [*request.output[sequence.final : request.known], *request.more], sequence.tail
    same = 0
    while same < min(len(new), len(sent)) and new[same] == sent[same]:
        same += 1
    row = Row(slot, sequence.number, sequence.final + same, new[same:], sequence.key, sequence.ends, request.may_end)
    sequence.tail = new[request.known - sequence.final :]
    sequence.final = request.known
    return row


def _whole_row(slot: int, request: MaskRequest) -> Row:
    """A row with the guide and all tokens."""
    sequence = request.sequence
    ends, may_end = sequence.ends, request.may_end
    return Row(slot, sequence.number, 0, request.tokens(), sequence.key, ends, may_end, sequence.guide)
