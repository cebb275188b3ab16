"""Child processes that receive work as JSON and report results as lines of JSON.

Each child runs in a separate session, so that it can be killed together with its descendants.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAST_CHARS = 1500
MARK = "result: "
"""Prefix of a report, since libraries print to standard output too."""

Reports = list[dict[str, Any]]


def read_work() -> dict[str, Any]:
    """Called in a child process: returns the work from its command line."""
    work: dict[str, Any] = json.loads(sys.argv[1])
    return work


def report(**result: Any) -> None:
    """Called in a child process: reports a result to the parent, even if the child crashes later."""
    print(MARK + json.dumps(result), flush=True)


class Children:
    """Runs children one after the other in one thread; any thread may kill the current child."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for temporary files."""
        self.folder = folder
        self._running: subprocess.Popen[str] | None = None

    def run_module(self, arguments: Sequence[str], seconds: float) -> tuple[Reports, str]:
        """Runs `python -m` with these arguments. Returns its reports, and how it ended, as `run`."""
        output, why = self.run([sys.executable, "-m", *arguments], seconds)
        lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
        return [json.loads(line) for line in lines], why

    def run(self, command: list[str], seconds: float) -> tuple[str, str]:
        """Returns standard output, and how the process failed with the tail of its standard error ("" on success)."""
        log = self.folder / "child.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, text=True, start_new_session=True
            )
            self._running = process
            try:
                output, _ = process.communicate(timeout=max(1.0, seconds))
                ended = "" if process.returncode == 0 else f"ended with status {process.returncode}"
            except subprocess.TimeoutExpired:
                self.kill()
                output, _ = process.communicate()
                ended = f"timed out after {seconds:.0f} s"
            finally:
                # Its descendants may still run.
                self.kill()
                self._running = None
        said = log.read_text(errors="replace")[-LAST_CHARS:]
        return output, f"{ended}: {said}" if ended else ""

    def kill(self) -> None:
        process = self._running
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
