"""The template process and the guide worker, as the engine sees them."""

import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine_worker.guided.memory import HEADER, MaskMemory
from engine_worker.guided.messages import FORK, Loaded
from sluice.ring.checkpoint import Checkpoint
from sluice.settings.engine import GuideLimits

ANSWER_BYTES = 1 << 13
SEND_SECONDS = 20
"""For a guide worker to read what it is sent."""
HUNG_SECONDS = 60.0
"""For the masks of a step, though the worker's own budgets are CPU time."""
START_SECONDS = 120.0
"""For the template to load the tokenizer."""
END_SECONDS = 1.0
"""For a template process to end by itself."""
SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
"""A process with threads cannot be forked safely."""
STARTS = 3
"""Attempts to start processes that something else ends."""


class GuidesLostError(Exception):
    """The processes cannot be started; the message says why."""


class Model(NamedTuple):
    """What guides depend on."""

    tokenizer: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def of(checkpoint: Checkpoint) -> "Model":
        return Model(checkpoint.tokenizer_file, checkpoint.vocab_size, checkpoint.eos_token_ids)


class WorkerLink(NamedTuple):
    """One guide worker."""

    steps: Connection
    compiles: Connection
    memory: MaskMemory
    pid: int


class TemplateLink:
    """One template process."""

    def __init__(self, model: Model, limits: GuideLimits) -> None:
        """Raises OSError if it cannot be started."""
        trials, their_trials = socket.socketpair()
        # Packets: whatever is sent is received as one.
        self._forks, their_forks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.trials = Connection(trials.detach())
        """Guides to try, and results."""
        self._loaded: Loaded | None = None
        with their_trials, their_forks:
            ends = (their_trials.fileno(), their_forks.fileno())
            budgets = (limits.guided_compile_seconds, limits.guided_mask_seconds, limits.guided_memory)
            arguments = map(str, (model.tokenizer, model.vocab_size, *budgets, *ends))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine_worker.guided.template", *arguments],
                stdin=subprocess.DEVNULL,
                # The library reports what it dies of there, in lines that are no log.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # -P drops the working directory from the path, so pass on wherever this process imports from.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **SINGLE_THREADED},
                pass_fds=ends,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_loaded(self) -> Loaded:
        """Raises EOFError, OSError or GuidesLostError."""
        if self._loaded is None:
            self._loaded = msgspec.msgpack.decode(self._receive(), type=Loaded)
        if self._loaded.error:
            raise GuidesLostError(f"the tokenizer cannot be used: {self._loaded.error}")
        return self._loaded

    def is_ready(self) -> bool:
        """Whether it reads what it is sent, or has ended. Never waits. Raises GuidesLostError."""
        if self._loaded is None and not select.select([self._forks], [], [], 0)[0]:
            return False
        with suppress(EOFError, OSError):
            self.wait_loaded()
        return True

    def _receive(self) -> bytes:
        self._forks.settimeout(START_SECONDS)
        answer = self._forks.recv(ANSWER_BYTES)
        if not answer:
            raise EOFError("the template process has ended")
        return answer

    def fork(self) -> tuple[int, WorkerLink]:
        """A new guide worker in place of the former one, with the signal that ended that. Raises OSError, EOFError and
        GuidesLostError."""
        loaded = self.wait_loaded()
        steps, their_steps = socket.socketpair()
        compiles, their_compiles = socket.socketpair()
        for end in (steps, compiles):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_SECONDS))
        # Cheaper than to poll before each of a step's messages.
        steps.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(HUNG_SECONDS))
        memory = MaskMemory.create(loaded.size)
        os.ftruncate(memory.descriptor, HEADER)
        memory.reach(1)
        with their_steps, their_compiles:
            ends = [their_steps.fileno(), their_compiles.fileno(), memory.descriptor]
            try:
                socket.send_fds(self._forks, [FORK], ends)
                answer = self._receive()
            except (OSError, EOFError):
                steps.close()
                compiles.close()
                raise
        status, pid = msgspec.msgpack.decode(answer, type=tuple[int, int])
        return status, WorkerLink(Connection(steps.detach()), Connection(compiles.detach()), memory, pid)

    def close(self) -> None:
        """Ends the process, and with it its children."""
        self.trials.close()
        self._forks.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class GuideProcesses:
    """Starts them when they are first needed, and anew when they have ended. The thread that computes steps and the one
    that runs the engine share them."""

    def __init__(self, start: Callable[[], TemplateLink]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._template: TemplateLink | None = None
        self._worker: WorkerLink | None = None
        self.forks = 0
        """Guide workers since the start."""

    def template(self, lost: TemplateLink | None = None) -> TemplateLink:
        """The one to use, other than `lost`, which has ended. Raises GuidesLostError."""
        with self._lock:
            return self._current_template(lost)

    def template_if_ready(self, lost: TemplateLink | None = None) -> TemplateLink | None:
        """The same, once it reads what it is sent. Never waits. Raises GuidesLostError."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            found = self._current_template(lost)
            return found if found.is_ready() else None
        finally:
            self._lock.release()

    def worker(self, lost: WorkerLink | None = None) -> tuple[int, WorkerLink]:
        """The guide worker to use, other than `lost`, which is ended, and the signal that ended that; 0 if unknown.
        Raises GuidesLostError."""
        with self._lock:
            if self._worker is not None and self._worker is not lost:
                return 0, self._worker
            template = None
            for _ in range(STARTS):
                template = self._current_template(template)
                with suppress(OSError, EOFError):
                    status, found = template.fork()
                    # Not closed: the other thread may read from it. Its ends are closed with the last reference.
                    self._worker = found
                    self.forks += 1
                    return status, found
            raise GuidesLostError("the guide worker cannot be started")

    def current(self) -> WorkerLink | None:
        return self._worker

    @property
    def generation(self) -> int:
        """Number of the guide worker; 0: there is none."""
        return 0 if self._worker is None else self.forks

    def close(self) -> None:
        with self._lock:
            if self._template is not None:
                self._template.close()
            self._worker = self._template = None

    def _current_template(self, lost: TemplateLink | None) -> TemplateLink:
        if self._template is None or self._template is lost:
            if self._template is not None:
                self._check(self._template)
                self._template.close()
            try:
                self._template = self._start()
            except OSError as error:
                raise GuidesLostError(f"the template process cannot be started: {error}") from error
        return self._template

    def _check(self, ended: TemplateLink) -> None:
        """Another one would fail like this one, if it could not load. Raises GuidesLostError."""
        with suppress(EOFError, OSError):
            ended.wait_loaded()


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
