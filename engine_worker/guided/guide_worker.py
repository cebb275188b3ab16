"""The guide worker: a process that computes masks, and may be killed at any time.

Its main thread computes the masks of steps. Other threads compile guides whose trial has succeeded, so that no step
waits for them. A kernel timer of the main thread's CPU time kills the process if a mask takes too long.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from engine_worker.guided.matchers import GuideError, Matchers, Tokens, shortened
from engine_worker.guided.memory import COMPILING, NOTHING, SLOT, MaskMemory
from engine_worker.guided.messages import (
    COMPILE_SLOTS,
    Compile,
    ComputeMasks,
    Key,
    MasksReady,
    Row,
    RowResult,
    receive,
    send,
)
from sluice.settings.engine import GuideLimits
from sluice.wire.params import Guide

TOKEN_SECONDS = 0.002
"""Additional CPU time for each token beyond the first: a new matcher consumes all tokens so far."""
COMPILE_NICENESS = 10
STACK_BYTES = 16 << 20
"""Stack of a thread that compiles. A trial has less, so what compiled there compiles here."""
SWITCH_SECONDS = 0.0005
"""Switch interval of the interpreter's lock, so that compiling delays masks little."""
SIGEV_SIGNAL = 0


class GuideWorker:
    def __init__(
        self, tokens: Tokens, limits: GuideLimits, steps: Connection, compiles: Connection, memory: MaskMemory
    ) -> None:
        self._limits = limits
        self._steps = steps
        self._compiles = compiles
        self._memory = memory
        self._matchers = Matchers(tokens, close=limits.guided_closed_objects)
        self._timer = CpuTimer()
        self._receiving, self._answering = threading.Lock(), threading.Lock()
        """Held by the thread that compiles and uses `_compiles` in this direction."""
        self._has_compiled = False
        """Whether a guide was compiled for the message that is being answered."""
        self._postponed: set[Key] = set()
        """Guides that are not compiled for this message."""

    def run(self) -> None:
        """Serve until the engine has closed its end."""
        sys.setswitchinterval(SWITCH_SECONDS)
        threading.stack_size(STACK_BYTES)
        self._memory.reach(1)
        for _ in range(COMPILE_SLOTS):
            threading.Thread(target=self._compile_all, daemon=True).start()
        try:
            while True:
                send(self._steps, self._masks(receive(self._steps, ComputeMasks)))
        except (EOFError, OSError):
            return

    def _masks(self, message: ComputeMasks) -> MasksReady:
        self._memory.reach(message.num_slots)
        self._matchers.release(message.released)
        self._has_compiled = False
        self._postponed.clear()
        header, unusual = self._memory.header, {}
        for row in message.rows:
            header[SLOT] = row.slot
            result = self._mask(row, message.never)
            if result is not None:
                unusual[row.slot] = result
        # Not in a finally clause: if a row raised, the process ends, and the header's slot names that row.
        self._timer.stop()
        header[SLOT] = NOTHING
        return MasksReady(unusual)

    def _mask(self, row: Row, never: tuple[int, ...]) -> RowResult | None:
        """None if the mask was written."""
        more = max(0, len(row.tokens) - 1)
        if row.guide is not None and (result := self._compile_for_step(row.key, row.guide)) is not None:
            return result
        self._timer.start(self._limits.guided_mask_seconds + more * TOKEN_SECONDS)
        try:
            return self._matchers.mask(row, self._memory, never)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - ends only this sequence
            return RowResult(0, error=shortened(f"{type(error).__name__}: {error}"))

    def _compile_for_step(self, key: Key, guide: Guide) -> RowResult | None:
        """Compile the guide of a row, unless another guide was compiled for this message: a step waits for it. None if
        the guide is compiled."""
        # All rows of a guide get the same answer, although the other thread may compile it meanwhile.
        if key not in self._postponed and self._matchers.has(key):
            return None
        if self._has_compiled:
            self._postponed.add(key)
            return RowResult(0, later=True)
        self._has_compiled = True
        self._timer.start(self._limits.guided_compile_seconds)
        try:
            self._matchers.compile(key, guide)
        except GuideError as error:
            return RowResult(0, error=str(error))
        return None

    def _compile_all(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
        try:
            while True:
                with self._receiving:
                    message = receive(self._compiles, Compile)
                self._matchers.release(message.released)
                self._compile(message)
                with self._answering:
                    self._compiles.send_bytes(message.key)
        finally:
            # Either the engine has closed its end, or it waits for an answer that only such a thread can send: so the
            # whole process must end with the thread.
            os._exit(1)

    def _compile(self, message: Compile) -> None:
        self._count_compiling(1)
        try:
            self._matchers.compile(message.key, message.guide)
        except GuideError:
            # It compiled in its trial; if it still fails here, the first row with it reports the error.
            pass
        finally:
            self._count_compiling(-1)

    def _count_compiling(self, change: int) -> None:
        with self._answering:
            self._memory.header[COMPILING] += change


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    )


class _Spec(ctypes.Structure):
    """`struct itimerspec`: the interval, which is 0, and the time until the signal."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class CpuTimer:
    """Ends the process with SIGPROF once the thread that created the timer has used a given amount of CPU time, even
    while native code is running. Python's `setitimer` counts the CPU time of all threads together."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "timer_create"):
            # Before glibc 2.34.
            library = ctypes.CDLL("librt.so.1", use_errno=True)
        self._set = library.timer_settime
        self._timer = ctypes.c_void_p()
        self._spec = _Spec()
        self._reference = ctypes.byref(self._spec)
        event = _Event(signal=signal.SIGPROF, notify=SIGEV_SIGNAL)
        if library.timer_create(time.CLOCK_THREAD_CPUTIME_ID, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def start(self, seconds: float) -> None:
        """Start again with this time. The signal's default action must be in place."""
        self._spec.seconds = int(seconds)
        self._spec.nanoseconds = int(seconds % 1 * 1e9)
        self._set(self._timer, 0, self._reference, None)

    def stop(self) -> None:
        self.start(0.0)
