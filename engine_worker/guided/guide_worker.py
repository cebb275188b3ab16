"""The guide worker: a process that computes masks, and may be killed at any time.

Its main thread serves steps; another one compiles what a trial has found to compile, so that no step waits for it. A
timer of the kernel, which counts this process's CPU time, kills it at a mask that takes too long.
"""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import NamedTuple

from engine_worker.guided.matchers import GuideError, Matchers, shortened
from engine_worker.guided.memory import COMPILING, NOTHING, SLOT, MaskMemory
from engine_worker.guided.messages import AskMasks, Compile, Key, MasksReady, Row, RowResult, receive, send
from engine_worker.guided.vocabulary import Tokens
from sluice.ring.params import Guide

TOKEN_SECONDS = 0.002
"""CPU time for each token beyond the first, where a matcher is made anew."""
COMPILE_NICENESS = 10
STACK_BYTES = 16 << 20
"""Of the thread that compiles; a trial had less."""
SWITCH_SECONDS = 0.0005


class Budgets(NamedTuple):
    compile_seconds: float
    """CPU time to compile a guide."""
    mask_seconds: float
    """CPU time for a sequence's mask."""
    memory: int
    """Bytes beyond those of the template process."""


class GuideWorker:
    def __init__(
        self, tokens: Tokens, budgets: Budgets, steps: Connection, compiles: Connection, memory: MaskMemory
    ) -> None:
        self._budgets = budgets
        self._steps = steps
        self._compiles = compiles
        self._memory = memory
        self._matchers = Matchers(tokens)
        self._has_compiled = False
        """For the message that is being answered."""
        self._late: set[Key] = set()
        """Guides that it will not get."""

    def run(self) -> None:
        """Until the engine has closed its end."""
        sys.setswitchinterval(SWITCH_SECONDS)
        threading.stack_size(STACK_BYTES)
        threading.Thread(target=self._compile_all, daemon=True).start()
        try:
            while True:
                send(self._steps, self._masks(receive(self._steps, AskMasks)))
        except (EOFError, OSError):
            return

    def _masks(self, asked: AskMasks) -> MasksReady:
        self._memory.reach(asked.num_slots)
        self._matchers.release(asked.released)
        self._has_compiled = False
        self._late.clear()
        header, unusual = self._memory.header, {}
        for row in asked.rows:
            header[SLOT] = row.slot
            result = self._mask(row, asked.never)
            if result is not None:
                unusual[row.slot] = result
        # Not if that raised: the process ends, and the slot says at which row.
        signal.setitimer(signal.ITIMER_PROF, 0)
        header[SLOT] = NOTHING
        return MasksReady(unusual)

    def _mask(self, row: Row, never: tuple[int, ...]) -> RowResult | None:
        """None: the mask is written."""
        budgets, more = self._budgets, max(0, len(row.tokens) - 1)
        if row.guide is not None and (result := self._compile_for_step(row.key, row.guide)) is not None:
            return result
        # The signal's default action ends the process, also within the library.
        signal.setitimer(signal.ITIMER_PROF, budgets.mask_seconds + more * TOKEN_SECONDS)
        try:
            return self._matchers.mask(row, self._memory, never)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, this sequence alone ends
            return RowResult(0, error=shortened(f"{type(error).__name__}: {error}"))

    def _compile_for_step(self, key: Key, guide: Guide) -> RowResult | None:
        """None: it is compiled. At most one for each message, since a step waits for it."""
        # All rows of a guide get the same answer, although the other thread may compile it meanwhile.
        if key not in self._late and self._matchers.has(key):
            return None
        if self._has_compiled:
            self._late.add(key)
            return RowResult(0, later=True)
        self._has_compiled = True
        signal.setitimer(signal.ITIMER_PROF, self._budgets.compile_seconds)
        try:
            self._matchers.compile(key, guide)
        except GuideError as error:
            return RowResult(0, error=str(error))
        return None

    def _compile_all(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
        try:
            while True:
                asked = receive(self._compiles, Compile)
                self._matchers.release(asked.released)
                self._compile(asked)
                self._compiles.send_bytes(asked.key)
        finally:
            # The engine is gone, or waits for an answer of this thread, which must not end alone.
            os._exit(1)

    def _compile(self, asked: Compile) -> None:
        self._memory.reach(1)
        self._memory.header[COMPILING] = 1
        try:
            self._matchers.compile(asked.key, asked.guide)
        except GuideError:
            # It was found to compile a moment ago; if it does not now, its first row says why.
            pass
        finally:
            self._memory.header[COMPILING] = NOTHING
