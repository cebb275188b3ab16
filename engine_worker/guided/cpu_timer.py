"""A timer of one thread's CPU time that ends the process."""

import ctypes
import os
import signal
import time

SIGEV_SIGNAL = 0


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
    """Ends the process with SIGPROF once the thread that created the timer has used some CPU time, even while native
    code is running. Python's `setitimer` counts the CPU time of all threads together."""

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
