"""Custom schedulers as users might write them, correct and broken.

Classes that end in `Whole` decide memory and micro batch together; the others are one of the two parts.
"""

import sys
from random import Random

from engine_worker.scheduling.guaranteed_no_evict import StaticBatch
from engine_worker.scheduling.micro_batch import Chunk, InFlightBatching
from engine_worker.scheduling.simple import RequestScheduler, Schedule


class Greedy:
    """Grants memory to all sequences."""

    def __init__(self, context):
        self.context = context

    def schedule_request(self, active):
        return list(active), []


class Newest(Greedy):
    """Correct: keeps running sequences; if there are none, starts the newest."""

    def schedule_request(self, active):
        return [sequence for sequence in active if sequence.blocks] or active[-1:], []


class Pausing(Greedy):
    """Runs only the last sequence in order and preempts the others."""

    def schedule_request(self, active):
        return active[-1:], active[:-1]


class Raising(Greedy):
    """Raises in every method, after clearing its argument."""

    def schedule_request(self, active):
        active.clear()
        raise RuntimeError("out of ideas")

    def schedule(self, fitting, inflight_request_ids):
        fitting.clear()
        sys.exit("out of ideas")


class RaisingWhole(RequestScheduler):
    """Raises after it has allocated and released blocks."""

    def schedule(self, active, inflight_request_ids=frozenset()):
        self.hold(active[1:])
        self.pause(active[:1])
        raise KeyboardInterrupt


class Idle(Greedy):
    """Never runs anything."""

    def schedule_request(self, active):
        return [], []

    def schedule(self, fitting, inflight_request_ids):
        return [], []


class IdleWhole(RequestScheduler):
    """`Idle` as a whole scheduler."""

    def schedule(self, active, inflight_request_ids=frozenset()):
        return Schedule([], [])


class NewestFirst(RequestScheduler):
    """Correct: runs one sequence at a time, the newest."""

    def schedule(self, active, inflight_request_ids=frozenset()):
        last = [sequence for sequence in active if sequence.request.submit.request not in inflight_request_ids][-1:]
        self.pause([sequence for sequence in active if sequence not in last])
        held = self.hold(last)
        context = [Chunk(s, min(s.num_pending, self.context.max_tokens_per_step)) for s in held if not s.generating]
        return Schedule(context, [sequence for sequence in held if sequence.generating])


class OwnStatic(StaticBatch):
    """The built-in static batch as a user's class."""


class OwnStaticWhole(RequestScheduler):
    """`OwnStatic` as a whole scheduler."""

    def __init__(self, context):
        super().__init__(context)
        self.capacity, self.micro_batch = StaticBatch(context), InFlightBatching(context)

    @property
    def static_batch(self):
        return self.capacity.static_batch

    def schedule(self, active, inflight_request_ids=frozenset()):
        fitting, _ = self.capacity.schedule_request(active)
        return Schedule(*self.micro_batch.schedule(self.hold(fitting), inflight_request_ids))


class OddFigures(StaticBatch):
    """Reports malformed statistics of its static batch, or raises."""

    figures: object = None
    """What `static_batch` returns. "raises", "lacks": it raises instead."""

    @property
    def static_batch(self):
        if self.figures == "raises":
            raise RuntimeError("out of figures")
        if self.figures == "lacks":
            return self.figures.no_such_thing
        return self.figures


class OddFiguresWhole(OwnStaticWhole):
    """`OddFigures` as a whole scheduler."""

    @property
    def static_batch(self):
        return OddFigures.static_batch.fget(OddFigures)


class Mad:
    """Randomly makes every kind of mistake. `remembered`: sequences seen before, which may have ended."""

    def __init__(self, context):
        self.random = Random(context.max_batch_size)
        self.remembered = []

    def _some(self, sequences):
        self.remembered = [*self.remembered, *sequences][-50:]
        if self.random.random() < 0.1:
            raise ValueError("mad")
        chosen = self.random.choices([*sequences, *self.remembered, None, 7], k=self.random.randrange(12))
        return chosen if self.random.random() < 0.7 else [*sequences, *chosen]

    def _size(self):
        return self.random.choice([1, 2, 5, 10_000, 0, -3, None, 1.5, True])

    def schedule_request(self, active):
        return self._some(active), self._some(active)[:2]

    def schedule(self, fitting, inflight_request_ids):
        answer = [Chunk(sequence, self._size()) for sequence in self._some(fitting)], self._some(fitting)
        return self.random.choice([answer, answer, answer, answer, None, (answer[0],), ([3], answer[1]), ([], [[]])])


class MadWhole(RequestScheduler):
    """`Mad` as a whole scheduler."""

    def __init__(self, context):
        super().__init__(context)
        self.mad = Mad(context)

    def schedule(self, active, inflight_request_ids=frozenset()):
        known = [sequence for sequence in self.mad._some(active) if sequence not in (None, 7)]
        self.pause(known[:1])
        self.hold(known)
        return self.mad.schedule(active, inflight_request_ids)


class WithoutMethods:
    """Lacks the methods of a scheduler."""

    def __init__(self, context):
        pass


class CannotBeMade(Greedy):
    """Its constructor requires an argument that the engine does not pass."""

    def __init__(self, context, more):
        super().__init__(context)


NO_CLASS = 3
