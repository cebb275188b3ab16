"""One run: tasks within a budget, what they found, and how far it is."""

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

from bench.gpu.budget import Budget
from bench.gpu.children import Children
from bench.gpu.files import write_whole
from bench.gpu.findings import Findings, Skip
from bench.gpu.page import markdown

GRACE = 20.0
"""Seconds past the budget that a task may take to end before the process does."""


class Session:
    """Tasks one after the other; a task that fails or cannot be done does not keep others from being done."""

    def __init__(self, findings: Findings, budget: Budget, device: torch.device, folder: Path, file: Path) -> None:
        """`folder` is for scratch, `file` is kept up to date with the findings, as is a page beside it."""
        self.findings = findings
        self.budget = budget
        self.device = device
        self.folder = folder
        self.children = Children()
        self._file = file
        self._doing = "the start"

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.budget.spent:4.0f} s] {text}", flush=True)

    def skip(self, name: str, why: str) -> None:
        """Say so, and write it down."""
        self.findings.skipped[name] = why
        self.say(f"{name}: skipped: {why}")

    def do(self, name: str, seconds: float, task: Callable[[], str], *, needed: bool = False) -> None:
        """Run a task that takes about so long and says what came of it. Where there is no time for it, it is left out;
        if it is `needed`, the run has failed then."""
        if self.budget.left < seconds:
            self._no_time(name, f"takes about {seconds:.0f} s, and {max(0.0, self.budget.left):.0f} are left", needed)
            return
        self._doing = self.findings.doing = name
        self.keep()
        self.say(f"{name} …")
        try:
            self.say(f"{name}: {task()}")
        except Skip as reason:
            self.skip(name, str(reason))
        except Exception as error:  # noqa: BLE001 - what others find is still to be written down
            self._fail(name, traceback.format_exc(), f"{type(error).__name__}: {error}")
        finally:
            self.findings.doing = ""
            self.keep()

    def keep(self) -> None:
        """Write what was found so far: a run may be cut off at any time."""
        self.findings.save(self._file)
        write_whole(self._file.with_suffix(".md"), markdown(self.findings))

    def end_on_signals(self) -> None:
        """A signal ends the process, and what it has started. What was found is written already."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._cut)

    def _cut(self, number: int, _frame: FrameType | None) -> None:
        self.children.kill()
        with suppress(Exception):
            self.say(f"cut off by {signal.Signals(number).name} during {self._doing}")
        # A thread that waits for a device cannot be ended.
        os._exit(128 + number)

    def _no_time(self, name: str, why: str, needed: bool) -> None:
        if needed:
            self._fail(name, why, why)
        else:
            self.skip(name, why)

    def _fail(self, name: str, how: str, short: str) -> None:
        self.findings.failed[name] = how
        self.say(f"{name}: FAILED: {short}")

    def watch(self, leave: Callable[[], None], grace: float = GRACE) -> None:
        """End the process where a task does not come back, and what it has started; before that `leave`, which writes
        what was found."""
        args = (threading.current_thread(), leave, grace)
        threading.Thread(target=self._watch, args=args, name="budget", daemon=True).start()

    def _watch(self, main: threading.Thread, leave: Callable[[], None], grace: float) -> None:
        while self.budget.left > -grace:
            time.sleep(max(0.01, self.budget.left + grace))
        why = f"not through {grace:.0f} s after the budget of {self.budget.seconds:.0f} s"
        with ExitStack() as last:
            # A thread that waits for a device cannot be ended.
            last.callback(os._exit, 1)
            last.callback(self.children.kill)
            try:
                self.findings.failed[self._doing] = f"{_stack(main)}{why}"
                print(f"{self._doing}: {why}", file=sys.stderr, flush=True)
                leave()
            except Exception:  # noqa: BLE001 - the process ends now
                traceback.print_exc()


def _stack(thread: threading.Thread) -> str:
    """Where it is just now."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
