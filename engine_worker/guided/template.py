"""The template process: holds the loaded tokenizer, runs no threads, and forks what may have to be killed.

That is the guide worker, one at a time, and a trial for each new guide. It ends when the engine closes its sockets, and
takes its children with it.
"""

import ctypes
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec

from engine_worker.guided.guide_worker import Budgets, GuideWorker
from engine_worker.guided.matchers import GuideError, compile_guide
from engine_worker.guided.memory import MaskMemory
from engine_worker.guided.messages import FORK, Key, Loaded, Outcome, Tried, Try, receive, send
from engine_worker.guided.vocabulary import Tokens, load_tokens
from sluice.ring.process import PR_SET_PDEATHSIG

TRIAL_NICENESS = 10
TRIAL_PATIENCE = 60.0
"""Seconds of wall time per second of CPU time that a trial may take, and at least so many: beside a busy process of the
usual niceness it gets a tenth of a core, beside several even less."""
NUM_DESCRIPTORS = 3
"""A guide worker's: for steps, for compiling, of the shared memory."""
MESSAGE_BYTES = 1 << 13
MAX_ERROR = 1000
"""Characters."""


class Trial:
    """A guide that is being compiled in a process of its own."""

    def __init__(self, key: Key, pid: int, pipe: int, until: float) -> None:
        self.key = key
        self.until = until
        self._pid = pid
        self._pipe = pipe

    def fileno(self) -> int:
        return self._pipe

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def result(self) -> Tried:
        """Once it has closed its pipe."""
        with open(self._pipe, "rb") as pipe:
            written = pipe.read(MESSAGE_BYTES)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if status == 0 and written:
            message = written[1:].decode("utf-8", "replace")
            return Tried(self.key, Outcome.INVALID if message else Outcome.COMPILED, message)
        if status == -signal.SIGKILL:
            return Tried(self.key, Outcome.LOST)
        return Tried(self.key, Outcome.DIED, signal=max(0, -status))


class Template:
    def __init__(self, tokens: Tokens, budgets: Budgets, trials: Connection, forks: socket.socket) -> None:
        self._tokens = tokens
        self._budgets = budgets
        self._asked = trials
        self._forks = forks
        self._trials: dict[int, Trial] = {}
        self._worker: int | None = None
        self._selector = selectors.DefaultSelector()
        for end in (trials, forks):
            self._selector.register(end, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the engine has closed its ends."""
        with suppress(EOFError, OSError):
            while True:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._asked:
                        self._begin(receive(self._asked, Try))
                    elif key.fileobj is self._forks:
                        self._fork_worker()
                    else:
                        self._end(self._trials[key.fd])
                for trial in self._trials.values():
                    if trial.until < time.monotonic():
                        trial.kill()

    def end_children(self) -> None:
        for trial in self._trials.values():
            trial.kill()
            trial.result()
        self._reap()

    def _patience(self) -> float | None:
        ends = [trial.until for trial in self._trials.values()]
        return max(0.01, min(ends) - time.monotonic()) if ends else None

    def _begin(self, asked: Try) -> None:
        ours, theirs = os.pipe()
        pid = self._fork(lambda: self._try(asked, theirs), keep=(theirs,))
        os.close(theirs)
        patience = max(TRIAL_PATIENCE, TRIAL_PATIENCE * self._budgets.compile_seconds)
        trial = Trial(asked.key, pid, ours, time.monotonic() + patience)
        self._trials[ours] = trial
        self._selector.register(ours, selectors.EVENT_READ)

    def _end(self, trial: Trial) -> None:
        self._selector.unregister(trial.fileno())
        del self._trials[trial.fileno()]
        send(self._asked, trial.result())

    def _try(self, asked: Try, pipe: int) -> None:
        """In the process of a trial."""
        os.nice(TRIAL_NICENESS)
        # Its default action ends the process, also within the library.
        signal.setitimer(signal.ITIMER_PROF, self._budgets.compile_seconds)
        try:
            compile_guide(self._tokens.tokenizer, asked.guide)
            message = ""
        except GuideError as error:
            message = str(error)
        os.write(pipe, b"." + message.encode())

    def _fork_worker(self) -> None:
        """In place of the one before; answers with how that ended."""
        asked, descriptors, *_ = socket.recv_fds(self._forks, len(FORK), NUM_DESCRIPTORS)
        if not asked:
            raise EOFError
        status = self._reap()
        self._worker = self._fork(lambda: self._serve(*descriptors), keep=tuple(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        self._forks.send(msgspec.msgpack.encode((status, self._worker)))

    def _reap(self) -> int:
        """End the guide worker; returns the signal that ended it, which may have been another one."""
        if self._worker is None:
            return 0
        worker, self._worker = self._worker, None
        os.kill(worker, signal.SIGKILL)
        return max(0, -os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))

    def _serve(self, steps: int, compiles: int, memory: int) -> None:
        """In the process of the guide worker."""
        masks = MaskMemory(memory, self._tokens.size)
        GuideWorker(self._tokens, self._budgets, Connection(steps), Connection(compiles), masks).run()

    def _fork(self, work: Callable[[], None], keep: tuple[int, ...]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            self._become_child(parent, keep)
            work()
            status = 0
        except MemoryError:
            # As the library ends where it gets no memory.
            os.abort()
        finally:
            # Nothing of the template's runs on: no handlers, no buffers.
            os._exit(status)

    def _become_child(self, parent: int, keep: tuple[int, ...]) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for descriptor in (self._asked.fileno(), self._forks.fileno(), *self._trials):
            if descriptor not in keep:
                os.close(descriptor)
        limit = _address_space() + self._budgets.memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def main(arguments: list[str]) -> NoReturn:
    """`arguments`: see `processes.TemplateLink`."""
    file, vocab_size, compile_seconds, mask_seconds, memory, trials, forks = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C in a terminal goes to the engine too, which drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked, engine = Connection(int(trials)), socket.socket(fileno=int(forks))
    budgets = Budgets(float(compile_seconds), float(mask_seconds), int(memory))
    try:
        tokens = load_tokens(Path(file), int(vocab_size))
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine says so to those who ask for guides
        engine.send(msgspec.msgpack.encode(Loaded(0, f"{type(error).__name__}: {error}"[:MAX_ERROR])))
        sys.exit(1)
    engine.send(msgspec.msgpack.encode(Loaded(tokens.size)))
    template = Template(tokens, budgets, asked, engine)
    template.run()
    template.end_children()
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
