"""The template process: holds the loaded tokenizer, runs no threads, and forks processes that may have to be killed.

These are the guide worker, one at a time, and a trial for each new guide. The template ends when the engine closes its
sockets, and ends its children first.
"""

import ctypes
import json
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

from engine_worker.guided.guide_worker import GuideWorker
from engine_worker.guided.matchers import GuideError, Tokens, compile_guide, load_tokens
from engine_worker.guided.memory import MaskMemory
from engine_worker.guided.messages import FORK, Key, Loaded, Outcome, StartTrial, TrialResult, is_stopped, receive, send
from sluice.host.process import PR_SET_PDEATHSIG
from sluice.settings.engine import GuideLimits

TRIAL_NICENESS = 10
TRIAL_PATIENCE = 60.0
"""Wall seconds after which a hanging trial is killed, per second of its CPU budget, and the least such time: next to
one busy process of normal niceness a trial gets a tenth of a core, next to several even less."""
CHECK_SECONDS = 1.0
"""How often running trials are checked."""
NUM_DESCRIPTORS = 3
"""Descriptors of a guide worker: for steps, for compiling, and of the shared memory."""
MESSAGE_BYTES = 1 << 13
"""Limit on the message of a trial."""
MAX_ERROR = 1000
"""Limit on the characters of an error of the tokenizer."""


class Trial:
    """A guide that is being compiled in a separate process."""

    def __init__(self, key: Key, pid: int, pipe: int, until: float) -> None:
        """`until`: monotonic seconds after which it is killed."""
        self.key = key
        self.until = until
        self.pid = pid
        self._pipe = pipe

    def fileno(self) -> int:
        return self._pipe

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def result(self) -> TrialResult:
        """The result; call it once the process has closed its pipe."""
        with open(self._pipe, "rb") as pipe:
            written = pipe.read(MESSAGE_BYTES)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if status == 0 and written:
            message = written[1:].decode("utf-8", "replace")
            return TrialResult(self.key, Outcome.INVALID if message else Outcome.COMPILED, message)
        if status == -signal.SIGKILL:
            return TrialResult(self.key, Outcome.LOST)
        return TrialResult(self.key, Outcome.DIED, signal=max(0, -status))


class Template:
    def __init__(self, tokens: Tokens, limits: GuideLimits, trials: Connection, forks: socket.socket) -> None:
        self._tokens = tokens
        self._limits = limits
        self._requests = trials
        """Receives StartTrial, sends TrialResult."""
        self._forks = forks
        self._trials: dict[int, Trial] = {}
        """By the descriptor of their pipe."""
        self._worker: int | None = None
        """Process id of the guide worker."""
        self._selector = selectors.DefaultSelector()
        for end in (trials, forks):
            self._selector.register(end, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the engine has closed its ends."""
        with suppress(EOFError, OSError):
            while True:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._requests:
                        self._begin(receive(self._requests, StartTrial))
                    elif key.fileobj is self._forks:
                        self._fork_worker()
                    else:
                        self._end(self._trials[key.fd])
                for trial in self._trials.values():
                    if trial.until < time.monotonic() or is_stopped(trial.pid):
                        trial.kill()

    def end_children(self) -> None:
        for trial in self._trials.values():
            trial.kill()
            trial.result()
        self._reap()

    def _patience(self) -> float | None:
        """Seconds until the trials have to be checked; None if there are no trials."""
        return CHECK_SECONDS if self._trials else None

    def _begin(self, request: StartTrial) -> None:
        reader, writer = os.pipe()
        pid = self._fork(lambda: self._try(request, writer), keep=(writer,))
        os.close(writer)
        patience = max(TRIAL_PATIENCE, TRIAL_PATIENCE * self._limits.guided_compile_seconds)
        trial = Trial(request.key, pid, reader, time.monotonic() + patience)
        self._trials[reader] = trial
        self._selector.register(reader, selectors.EVENT_READ)

    def _end(self, trial: Trial) -> None:
        self._selector.unregister(trial.fileno())
        del self._trials[trial.fileno()]
        send(self._requests, trial.result())

    def _try(self, request: StartTrial, pipe: int) -> None:
        """Runs in the trial's process."""
        os.nice(TRIAL_NICENESS)
        # The signal's default action ends the process, even while llguidance is running.
        signal.setitimer(signal.ITIMER_PROF, self._limits.guided_compile_seconds)
        try:
            compile_guide(self._tokens.tokenizer, request.guide, close=self._limits.guided_closed_objects)
            message = ""
        except GuideError as error:
            message = str(error)
        os.write(pipe, b"." + message.encode())

    def _fork_worker(self) -> None:
        """Replace the guide worker; answers with the signal that ended the previous one."""
        message, descriptors, *_ = socket.recv_fds(self._forks, len(FORK), NUM_DESCRIPTORS)
        if not message:
            raise EOFError
        status = self._reap()
        self._worker = self._fork(lambda: self._serve(*descriptors), keep=tuple(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        self._forks.send(msgspec.msgpack.encode((status, self._worker)))

    def _reap(self) -> int:
        """End the guide worker; returns the signal that ended it, which is not SIGKILL if it had already died."""
        if self._worker is None:
            return 0
        worker, self._worker = self._worker, None
        os.kill(worker, signal.SIGKILL)
        return max(0, -os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))

    def _serve(self, steps: int, compiles: int, memory: int) -> None:
        """Runs in the guide worker's process."""
        masks = MaskMemory(memory, self._tokens.size)
        GuideWorker(self._tokens, self._limits, Connection(steps), Connection(compiles), masks).run()

    def _fork(self, work: Callable[[], None], keep: tuple[int, ...]) -> int:
        """Run `work` in a child process; returns its id. `keep`: descriptors that stay open in the child."""
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
            # The same signal with which llguidance ends the process when it is out of memory.
            os.abort()
        finally:
            # Skip the exit handlers and buffers inherited from the template.
            os._exit(status)

    def _become_child(self, parent: int, keep: tuple[int, ...]) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for descriptor in (self._requests.fileno(), self._forks.fileno(), *self._trials):
            if descriptor not in keep:
                os.close(descriptor)
        limit = _address_space() + self._limits.guided_memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _address_space() -> int:
    """Bytes of this process's address space."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def main(arguments: list[str]) -> NoReturn:
    """`arguments`: as `processes.TemplateLink` passes them."""
    file, vocab_size, budgets, trials, forks = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C in a terminal also reaches the engine, which then drains and still needs this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, engine = Connection(int(trials)), socket.socket(fileno=int(forks))
    limits = GuideLimits(**json.loads(budgets))
    try:
        tokens = load_tokens(Path(file), int(vocab_size))
    except Exception as error:  # noqa: BLE001 - the engine reports it to every request with a guide
        engine.send(msgspec.msgpack.encode(Loaded(0, f"{type(error).__name__}: {error}"[:MAX_ERROR])))
        sys.exit(1)
    engine.send(msgspec.msgpack.encode(Loaded(tokens.size)))
    template = Template(tokens, limits, requests, engine)
    template.run()
    template.end_children()
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
