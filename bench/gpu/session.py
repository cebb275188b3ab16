"""Runs tasks within a time budget; stores their results and reports progress."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

import torch

from bench.gpu.children import Children
from bench.gpu.findings import Findings, Skip, write_whole
from bench.gpu.page import markdown

GRACE = 20.0
"""Seconds after the end of the budget in which the running task may still end, before the process is ended."""


class Budget:
    """Seconds spent and left since this object was created."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._began

    @property
    def left(self) -> float:
        return self.seconds - self.spent


class GpuSession:
    """Runs tasks one after the other. After a task that fails or is skipped, the next one runs."""

    def __init__(self, findings: Findings, budget: Budget, device: torch.device, folder: Path, file: Path) -> None:
        """`folder` is for temporary files. `file` and the page next to it are updated after each task."""
        self.findings = findings
        self.budget = budget
        self.device = device
        self.folder = folder
        self.children = Children(folder)
        self._file = file
        self._doing = "the start"

    def say(self, text: str) -> None:
        print(f"[{self.budget.spent:4.0f} s] {text}", flush=True)

    def skip(self, name: str, why: str) -> None:
        self.findings.skipped[name] = why
        self.say(f"{name}: skipped: {why}")

    def do(self, name: str, seconds: float, task: Callable[[], str], *, needed: bool = False) -> None:
        """Run a task that takes about `seconds` and returns a line that describes its result.

        If time or memory does not suffice, a task that is `needed` counts as failed, and any other as skipped.
        """
        if self.budget.left < seconds:
            why = f"takes about {seconds:.0f} s, and {max(0.0, self.budget.left):.0f} are left"
            if needed:
                self._fail(name, why, why)
            else:
                self.skip(name, why)
            return
        self._doing = self.findings.doing = name
        self.keep()
        self.say(f"{name} …")
        try:
            self.say(f"{name}: {task()}")
        except Skip as reason:
            self.skip(name, str(reason))
        except Exception as error:  # noqa: BLE001 - later tasks must still run
            if isinstance(error, torch.OutOfMemoryError) and not needed:
                self.skip(name, f"out of memory: {str(error).splitlines()[0]}")
            else:
                self._fail(name, traceback.format_exc(), f"{type(error).__name__}: {error}")
        finally:
            self.findings.doing = ""
            self.keep()

    def keep(self) -> None:
        """Write the findings so far, since the run may be killed at any time."""
        self.findings.save(self._file)
        write_whole(self._file.with_suffix(".md"), markdown(self.findings))

    def end_on_signals(self) -> None:
        """Let SIGTERM, SIGINT and SIGHUP end the process and its children. The findings have been written already."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.children.kill()
        with suppress(Exception):
            self.say(f"ended by {signal.Signals(number).name} during {self._doing}")
        # A thread that waits for a device cannot be interrupted.
        os._exit(128 + number)

    def _fail(self, name: str, how: str, short: str) -> None:
        self.findings.failed[name] = how
        self.say(f"{name}: FAILED: {short}")

    def watch(self, write: Callable[[], None], grace: float = GRACE) -> None:
        """End the process and its children if a task runs longer than `grace` seconds after the end of the budget.

        `write` is called first, to write the findings.
        """
        args = (threading.current_thread(), write, grace)
        timer = threading.Timer(max(0.0, self.budget.left + grace), self._end_process, args)
        timer.daemon = True
        timer.start()

    def _end_process(self, main: threading.Thread, write: Callable[[], None], grace: float) -> None:
        why = f"did not end within {grace:.0f} s after the budget of {self.budget.seconds:.0f} s"
        with ExitStack() as last:
            # A thread that waits for a device cannot be interrupted, so the process exits, even if `write` raises.
            # Callbacks run in reverse order: kill the children, then exit.
            last.callback(os._exit, 1)
            last.callback(self.children.kill)
            try:
                self.findings.failed[self._doing] = f"{_stack(main)}{why}"
                print(f"{self._doing}: {why}", file=sys.stderr, flush=True)
                write()
            except Exception:  # noqa: BLE001 - the process ends anyway
                traceback.print_exc()


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
