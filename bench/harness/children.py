"""Systems in child processes. They read loads from standard input and write runs to standard output, as JSON lines."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeVar, cast

import msgspec

from bench.harness.load import Load, Run

READY = b"ready\n"
ROOT = Path(__file__).parents[2]
CLOSE_SECONDS = 20.0

T = TypeVar("T")


class SystemProcess:
    """A child process that answers questions, such as loads. Raises RuntimeError if the process dies."""

    def __init__(
        self,
        name: str,
        module: str | Path,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        python: Path | str = sys.executable,
        root: Path = ROOT,
    ) -> None:
        """`module` is a module's name or a file; `python` an interpreter with msgspec and everything that the module
        imports; `root` the checkout to run in."""
        self.name = name
        self._log = log
        program = [str(module)] if isinstance(module, Path) else ["-m", module]
        command = [str(python), *program, *arguments]
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, cwd=root, env=environment
            )
        # Never None: both are pipes.
        self._stdin = cast(IO[bytes], self._process.stdin)
        self._stdout = cast(IO[bytes], self._process.stdout)
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, load: Load) -> Run:
        return self.query(load, Run)

    def query(self, question: msgspec.Struct, answer: type[T]) -> T:
        # Loading takes seconds, so all children are started first and then awaited one by one.
        if not self._ready:
            self._ready = self._read() == READY
        self._stdin.write(msgspec.json.encode(question) + b"\n")
        self._stdin.flush()
        return msgspec.json.decode(self._read(), type=answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> bytes:
        line = self._stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died:\n{self._log.read_text(errors='replace')[-4000:]}")
        return line


def claim_output() -> IO[bytes]:
    """Reserves standard output for answers: from now on, the output of libraries goes to standard error."""
    lines = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return lines


def serve(answer: Callable[[Load], Run], lines: IO[bytes] | None = None) -> None:
    """Runs in the child: answers loads until standard input ends. Pass `lines` if `claim_output` was called before."""
    serve_questions(Load, answer, lines)


def serve_questions(kind: type[T], answer: Callable[[T], msgspec.Struct], lines: IO[bytes] | None = None) -> None:
    """As `serve`, for questions of another type."""
    lines = lines or claim_output()
    lines.write(READY)
    lines.flush()
    for line in sys.stdin.buffer:
        lines.write(msgspec.json.encode(answer(msgspec.json.decode(line, type=kind))) + b"\n")
        lines.flush()


def cpu_seconds(pid: int, with_ended_children: bool = False) -> float:
    """CPU time of all threads of a process so far, user and system, from Linux' /proc in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11 : 15 if with_ended_children else 13])) / os.sysconf("SC_CLK_TCK")


def exact_cpu_seconds(pid: int) -> float:
    """As `cpu_seconds`, with nanosecond resolution: the clock of clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)
