"""Child processes, each with a session of its own, so that it can be killed together with its descendants."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAST_CHARS = 1500


class Children:
    """One thread runs them, one after the other; any thread may kill the current one."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[str] | None = None

    def run(self, command: list[str], log: Path, seconds: float) -> tuple[str, str]:
        """Standard output, and how it ended with the tail of its standard error; "" on success."""
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
                ended = f"not through after {seconds:.0f} s"
            finally:
                self.kill()
                self._running = None
        said = log.read_text(errors="replace")[-LAST_CHARS:]
        return output, f"{ended}: {said}" if ended else ""

    def kill(self) -> None:
        process = self._running
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
