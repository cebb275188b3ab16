"""One run: tasks within a budget, what they found, and how far it is."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu.budget import Budget
from bench.gpu.findings import Findings, Skip

GRACE = 20.0
"""Seconds past the budget that a task may take to end before the process does."""


class Session:
    """Tasks one after the other; a task that fails or cannot be done does not keep others from being done."""

    def __init__(self, findings: Findings, budget: Budget, device: torch.device, folder: Path, file: Path) -> None:
        """`folder` is for scratch, `file` is kept up to date with the findings."""
        self.findings = findings
        self.budget = budget
        self.device = device
        self.folder = folder
        self._file = file

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.budget.spent:4.0f} s] {text}", flush=True)

    def skip(self, name: str, why: str) -> None:
        """Say so, and write it down."""
        self.findings.skipped[name] = why
        self.say(f"{name}: skipped: {why}")

    def do(self, name: str, seconds: float, task: Callable[[], str]) -> None:
        """Run a task that takes about so long and says what came of it."""
        if self.budget.left < seconds:
            self.skip(name, f"takes about {seconds:.0f} s, and {max(0.0, self.budget.left):.0f} are left")
            return
        self.say(f"{name} …")
        try:
            self.say(f"{name}: {task()}")
        except Skip as reason:
            self.skip(name, str(reason))
        except torch.OutOfMemoryError as error:
            self.skip(name, f"out of memory: {str(error).splitlines()[0]}")
        except Exception as error:  # noqa: BLE001 - what others find is still to be written down
            self.findings.failed[name] = traceback.format_exc()
            self.say(f"{name}: FAILED: {type(error).__name__}: {error}")
        finally:
            self.findings.save(self._file)

    def watch(self, grace: float = GRACE) -> None:
        """End the process where a task does not come back. What was found until then is written."""
        threading.Thread(target=self._watch, args=(grace,), name="budget", daemon=True).start()

    def _watch(self, grace: float) -> None:
        while self.budget.left > -grace:
            time.sleep(max(0.01, self.budget.left + grace))
        print(f"not through {grace:.0f} s after the budget of {self.budget.seconds:.0f} s", file=sys.stderr)
        # A thread that waits for a device cannot be ended.
        os._exit(1)
