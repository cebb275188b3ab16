"""Systems in processes of their own, which answer loads on their standard input with runs on their standard output."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Generic, Self, TypeVar, cast

import msgspec

from bench.load import Load, R, Run

L = TypeVar("L", bound=Load)

READY = b"ready\n"
ROOT = Path(__file__).parents[1]
CLOSE_SECONDS = 20.0


class Child(Generic[R]):
    """A `python -m module` that serves loads, and a context manager. Raises RuntimeError when the process dies.

    It is waited for at its first load, so that several children start at the same time.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        answers: type[R],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`log` gets what the process writes to standard error; the environment is ours unless it is given."""
        self.name = name
        self._answers = answers
        self._log = log
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                cwd=ROOT,
                env=environment,
            )
        # There, for both are pipes.
        self._stdin = cast(IO[bytes], self._process.stdin)
        self._stdout = cast(IO[bytes], self._process.stdout)
        self._ready = False

    def run(self, load: Load) -> R:
        """Hand the load over and wait."""
        if not self._ready:
            self._ready = self._read() == READY
        self._stdin.write(msgspec.json.encode(load) + b"\n")
        self._stdin.flush()
        return msgspec.json.decode(self._read(), type=self._answers)

    def close(self) -> None:
        """End the process: politely, then not."""
        self._stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> bytes:
        line = self._stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died:\n{self._log.read_text(errors='replace')[-4000:]}")
        return line


def serve(answer: Callable[[L], Run], loads: type[L]) -> None:
    """The child's side: answer loads of this type until standard input ends."""
    lines = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    lines.write(READY)
    lines.flush()
    for line in sys.stdin.buffer:
        lines.write(msgspec.json.encode(answer(msgspec.json.decode(line, type=loads))) + b"\n")
        lines.flush()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system, all threads. From Linux' /proc, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
