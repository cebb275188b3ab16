"""Guided decoding in the engine's thread: prepares guides, which sequences then follow.

A new guide is first compiled in a trial process, to find out whether it compiles within its budget, and then in the
guide worker, where all sequences with this guide share the result. Its requests wait meanwhile.
"""

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from typing import TypeVar

from engine_worker.guided.faults import RefusedGuides, invalid, lost, too_complex, unavailable
from engine_worker.guided.masks import GuidedSequence, Masks, take_all
from engine_worker.guided.messages import (
    COMPILE_SLOTS,
    MAX_COMPILED,
    Compile,
    Key,
    Outcome,
    StartTrial,
    TrialResult,
    key_of,
    receive,
    send,
)
from engine_worker.guided.processes import GuideModel, GuideProcesses, GuidesLostError, TemplateLink, WorkerLink
from sluice.settings.engine import GuideLimits
from sluice.wire.errors import Fault
from sluice.wire.params import Guide

V = TypeVar("V")

MAX_READY = 1024
"""Guides that are remembered as valid."""
TRIAL_SLOTS = 3
"""Limit on concurrent trials, which take cores from the engine."""
MAX_LOST = 3
"""Trials of one guide that may be killed for reasons other than the guide."""


def why_unavailable() -> str | None:
    """Why this engine has no guided decoding; None if it has, unless llguidance cannot read the model's tokenizer."""
    if sys.platform != "linux":
        return "it needs Linux"
    return "the package llguidance is not installed" if find_spec("llguidance") is None else None


class Preparation:
    """The preparation of one guide, shared by all requests that wait for it. See
    `engine_worker.protocol.Preparation`."""

    def __init__(self, key: Key, guide: Guide, advance: Callable[[], None]) -> None:
        self.key = key
        self.guide = guide
        self.tenants: set[str] = set()
        """Tenants of its requests."""
        self.done = False
        self.fault: Fault | None = None
        self.num_waiting = 0
        """Requests that wait for it."""
        self.num_lost = 0
        """Its trials that were killed for reasons other than the guide."""
        self._advance = advance

    def poll(self) -> bool:
        if not self.done:
            self._advance()
        return self.done

    def withdraw(self) -> None:
        self.num_waiting -= 1

    def end(self, fault: Fault | None = None) -> None:
        self.done, self.fault = True, fault


def refused_guide(guide: Guide, reason: str = "it was started without") -> Preparation:
    preparation = Preparation(key_of(guide), guide, lambda: None)
    preparation.end(unavailable(reason))
    return preparation


class Turns:
    """Guides that wait for a slot or hold one. Tenants take turns, and no tenant ever holds all slots."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: at least 2. A tenant gets at most all but one, so that another tenant finds a slot at once."""
        self._num_slots = num_slots
        self._waiting: dict[Key, Preparation] = {}
        self._holders: dict[Key, str] = {}
        """The tenants that hold slots."""
        self._last_turns: dict[str, int] = {}
        """By tenant, the number of its last turn. Forgotten once no guide waits."""
        self._num_turns = 0
        self.running: dict[Key, Preparation] = {}
        """The guides that hold slots."""

    @property
    def waiting(self) -> list[Preparation]:
        return list(self._waiting.values())

    def add(self, guide: Preparation) -> None:
        self._waiting[guide.key] = guide

    def has_next(self) -> bool:
        return self._next() is not None

    def begin(self) -> Preparation:
        """Give the next guide a slot and return it. There must be one: see `has_next`."""
        chosen = self._next()
        if chosen is None:
            raise LookupError("no guide can have a slot")
        tenant, guide = chosen
        self._num_turns += 1
        self._last_turns[tenant] = self._num_turns
        del self._waiting[guide.key]
        if not self._waiting:
            self._last_turns.clear()
        self.running[guide.key], self._holders[guide.key] = guide, tenant
        return guide

    def discard(self, guide: Preparation) -> None:
        """Remove a guide, whether it waits or holds a slot."""
        for guides in (self._waiting, self.running, self._holders):
            guides.pop(guide.key, None)

    def _next(self) -> tuple[str, Preparation] | None:
        """Of the tenants that may have another slot, the one whose last turn is longest ago, and its first guide."""
        if len(self.running) >= self._num_slots:
            return None
        held = list(self._holders.values())
        full = {tenant for tenant in held if held.count(tenant) >= self._num_slots - 1}
        turns = [
            (self._last_turns.get(tenant, 0), i, tenant, guide)
            for i, guide in enumerate(self._waiting.values())
            for tenant in guide.tenants - full
        ]
        return min(turns, key=lambda turn: turn[:2])[2:] if turns else None


class Guides:
    def __init__(self, model: GuideModel, limits: GuideLimits) -> None:
        """The processes are started when they are first needed."""
        reason = why_unavailable()
        self._unavailable = None if reason is None else unavailable(reason)
        self._limits = limits
        self._processes = GuideProcesses(lambda: TemplateLink(model, limits))
        self._refused_guides = RefusedGuides(limits)
        self._released: deque[int] = deque()
        """Numbers of sequences whose matchers the guide worker can drop."""
        self.masks = Masks(self._processes, self._refused_guides, model.eos_token_ids, self._released)
        self._numbers = count()
        self._ready: OrderedDict[Key, None] = OrderedDict()
        """Guides whose trial has succeeded, the latest MAX_READY."""
        self._compiled: OrderedDict[Key, int] = OrderedDict()
        """Guides that a guide worker has compiled, with its generation; the latest MAX_COMPILED, which it keeps."""
        self._pending: dict[Key, Preparation] = {}
        """All preparations that are not done. Each is in `_trials` or `_compilations`."""
        self._trials = Turns(TRIAL_SLOTS)
        self._template: TemplateLink | None = None
        """The template process that runs trials; None until one is ready."""
        self._ended: TemplateLink | None = None
        """The previous template process, which has ended."""
        self._compilations = Turns(COMPILE_SLOTS)
        """Preparations whose trial has succeeded."""
        self._link: WorkerLink | None = None
        """The guide worker that compiles the running ones."""

    def prepare(self, guide: Guide, *, tenant: str = "", recovered: bool = False) -> Preparation | None:
        """None if the guide is ready. `recovered`: an earlier attempt of this stream has run, so its guide is not
        refused because of other streams: only their tokens may have made it too complex."""
        key = key_of(guide)
        fault = self._unavailable or (None if recovered else self._refused_guides.find(key))
        if fault is None and self._is_compiled(key):
            return None
        found = self._pending.get(key)
        if found is None:
            found = Preparation(key, guide, self.advance)
            if fault is not None:
                found.end(fault)
                return found
            self._pending[key] = found
            (self._compilations if key in self._ready else self._trials).add(found)
        found.tenants.add(tenant)
        found.num_waiting += 1
        return found

    def _is_compiled(self, key: Key) -> bool:
        """Whether the current guide worker has probably compiled the guide; if not, it does so for the first mask."""
        if key not in self._compiled or self._compiled[key] != self._processes.generation:
            return False
        self._compiled.move_to_end(key)
        return True

    def sequences(self, guide: Guide, ends: Sequence[int], size: int) -> list[GuidedSequence]:
        """`size` sequences that follow the guide. `ends`: ids that end them."""
        key = key_of(guide)
        return [GuidedSequence(next(self._numbers), key, guide, ends, self._released) for _ in range(size)]

    def advance(self) -> None:
        """Move all preparations on: read results of trials and compilations, and start the next ones. Never waits."""
        try:
            self._read_trials()
            self._begin_trials()
        except GuidesLostError as error:
            self._fail_all(lost(str(error)))
        self._read_compiled()
        self._begin_compiling()

    def close(self) -> None:
        self._processes.close()

    def _begin_trials(self) -> None:
        self._drop_withdrawn(self._trials)
        while self._trials.has_next():
            if self._template is None:
                self._template = self._processes.template_if_ready(self._ended)
            if self._template is None:
                return
            preparation = self._trials.begin()
            self._template.end_if_stopped()
            try:
                send(self._template.trials, StartTrial(preparation.key, preparation.guide))
            except OSError:
                # It has ended, or may have received half a message. `_read_trials` notices.
                self._template.kill()

    def _read_trials(self) -> None:
        while self._trials.running and self._template is not None:
            try:
                if not self._template.trials.poll(0):
                    self._template.end_if_stopped()
                    return
                tried = receive(self._template.trials, TrialResult)
            except (EOFError, OSError):
                self._ended, self._template = self._template, None
                for preparation in list(self._trials.running.values()):
                    self._on_lost(preparation)
                return
            self._on_tried(self._trials.running[tried.key], tried)

    def _on_tried(self, preparation: Preparation, tried: TrialResult) -> None:
        key, guide = preparation.key, preparation.guide
        if tried.outcome is Outcome.LOST:
            self._on_lost(preparation)
        elif tried.outcome is Outcome.COMPILED:
            self._trials.discard(preparation)
            self._compilations.add(preparation)
        elif tried.outcome is Outcome.INVALID:
            self._end(preparation, invalid(guide, tried.message))
        else:
            fault = too_complex(guide, tried.signal, self._limits, compiling=True)
            self._refused_guides.refuse(key, fault)
            self._end(preparation, fault)

    def _on_lost(self, preparation: Preparation) -> None:
        """A trial was killed for a reason other than its guide."""
        self._trials.discard(preparation)
        preparation.num_lost += 1
        if preparation.num_lost < MAX_LOST:
            self._trials.add(preparation)
        else:
            self._end(preparation, lost("the process that compiles the guide was killed"))

    def _drop_withdrawn(self, turns: Turns) -> None:
        for preparation in [preparation for preparation in turns.waiting if not preparation.num_waiting]:
            turns.discard(preparation)
            del self._pending[preparation.key]

    def _begin_compiling(self) -> None:
        self._drop_withdrawn(self._compilations)
        while self._compilations.has_next() and self._may_fork():
            if self._compilations.running and self._link is not self._processes.current():
                # Another worker compiles the running ones, and has died: `_read_compiled` notices.
                return
            preparation = self._compilations.begin()
            try:
                _, self._link = self._processes.worker()
            except GuidesLostError as error:
                self._end(preparation, lost(str(error)))
                continue
            self._link.end_if_stopped()
            try:
                send(self._link.compiles, Compile(preparation.key, preparation.guide, take_all(self._released)))
            except OSError:
                # The worker has died, or may have received half a message. The next one will compile the guide for its
                # first mask.
                self._link.kill()
                self._end(preparation)

    def _may_fork(self) -> bool:
        """Whether there is a guide worker, or one can be forked without waiting for a template process."""
        if self._processes.current() is not None:
            return True
        with suppress(GuidesLostError):
            return self._processes.template_if_ready(self._ended) is not None
        # The caller requests a worker, which raises the same error.
        return True

    def _read_compiled(self) -> None:
        running = self._compilations.running
        while running and self._link is not None:
            try:
                if not self._link.compiles.poll(0):
                    self._link.end_if_stopped()
                    return
                key = self._link.compiles.recv_bytes()
            except (EOFError, OSError):
                # The next worker will compile the guides for their first masks.
                for preparation in list(running.values()):
                    self._end(preparation)
                return
            self._end(running[key])

    def _end(self, preparation: Preparation, fault: Fault | None = None) -> None:
        key = preparation.key
        del self._pending[key]
        self._trials.discard(preparation)
        self._compilations.discard(preparation)
        if fault is None:
            _keep(self._ready, key, None, MAX_READY)
            _keep(self._compiled, key, self._processes.generation, MAX_COMPILED)
        preparation.end(fault)

    def _fail_all(self, fault: Fault) -> None:
        """End all preparations whose trial has not succeeded."""
        self._template = None
        for preparation in [*self._trials.running.values(), *self._trials.waiting]:
            self._end(preparation, fault)


def _keep(latest: OrderedDict[Key, V], key: Key, value: V, limit: int) -> None:
    latest[key] = value
    latest.move_to_end(key)
    while len(latest) > limit:
        latest.popitem(last=False)
