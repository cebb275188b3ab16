"""The engine's side of the template process and of the guide worker."""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine_worker.guided.memory import HEADER, MaskMemory
from engine_worker.guided.messages import FORK, Loaded, is_stopped, poll_of, wait_for
from sluice.checkpoint.folder import Checkpoint
from sluice.settings.engine import GuideLimits

ANSWER_BYTES = 1 << 13
"""Limit on an answer of the template process."""
SEND_SECONDS = 2
"""Timeout of sends: a long guide does not fit the buffer of a socket from which a stopped process reads nothing."""
HUNG_SECONDS = 60.0
"""Timeout for the masks of a step. This is wall time: the worker's own budgets are CPU time."""
START_SECONDS = 120.0
"""Timeout for the template process to load the tokenizer."""
END_SECONDS = 1.0
"""Time in which a template process should exit before it is killed."""
SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
"""Environment of the template process: a process with threads cannot be forked safely."""
STARTS = 3
"""Attempts to start a guide worker if its template process ends meanwhile."""


class GuidesLostError(Exception):
    """The processes cannot be started; the message says why."""


class GuideModel(NamedTuple):
    """The properties of a model that guided decoding depends on."""

    tokenizer: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def of(checkpoint: Checkpoint) -> "GuideModel":
        return GuideModel(checkpoint.tokenizer_file, checkpoint.vocab_size, checkpoint.eos_token_ids)


class WorkerLink(NamedTuple):
    """One guide worker."""

    steps: Connection
    compiles: Connection
    memory: MaskMemory
    pid: int
    poll: select.poll
    """For `steps`. Cheaper than polling the connection."""

    def kill(self) -> None:
        """Its connections close."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def end_if_stopped(self) -> None:
        """Kill a worker that was stopped."""
        if is_stopped(self.pid):
            self.kill()

    def wait(self) -> None:
        """Wait for a message of `steps`. Raises BlockingIOError if the worker was stopped or does not answer."""
        wait_for(self.poll, self.pid, HUNG_SECONDS)


class TemplateLink:
    """One template process."""

    def __init__(self, model: GuideModel, limits: GuideLimits) -> None:
        """Raises OSError if it cannot be started."""
        trials, their_trials = socket.socketpair()
        # Packets keep message boundaries.
        self._forks, their_forks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _limit_sends(trials)
        self.trials = Connection(trials.detach())
        """Sends StartTrial, receives TrialResult."""
        self._loaded: Loaded | None = None
        with their_trials, their_forks:
            ends = (their_trials.fileno(), their_forks.fileno())
            # Not all of `limits`, which may be the whole settings of the engine.
            budgets = {field.name: getattr(limits, field.name) for field in fields(GuideLimits)}
            arguments = map(str, (model.tokenizer, model.vocab_size, json.dumps(budgets), *ends))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine_worker.guided.template", *arguments],
                stdin=subprocess.DEVNULL,
                # llguidance prints crashes there, in lines that would corrupt the log.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # -P drops the working directory from the path, so pass on the whole path of this process.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **SINGLE_THREADED},
                pass_fds=ends,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_loaded(self) -> Loaded:
        """Wait until the tokenizer is loaded. Raises GuidesLostError if it cannot be used, EOFError or OSError if the
        process has ended."""
        if self._loaded is None:
            self._loaded = msgspec.msgpack.decode(self._receive(), type=Loaded)
        if self._loaded.error:
            raise GuidesLostError(f"the tokenizer cannot be used: {self._loaded.error}")
        return self._loaded

    def is_ready(self) -> bool:
        """Whether the tokenizer is loaded, or the process has ended. Never waits. Raises GuidesLostError if the
        tokenizer cannot be used."""
        if self._loaded is None and not select.select([self._forks], [], [], 0)[0]:
            return False
        with suppress(EOFError, OSError):
            self.wait_loaded()
        return True

    def _receive(self) -> bytes:
        try:
            wait_for(poll_of(self._forks.fileno()), self.pid, START_SECONDS)
        except BlockingIOError:
            self.kill()
            raise
        answer = self._forks.recv(ANSWER_BYTES)
        if not answer:
            raise EOFError("the template process has ended")
        return answer

    def kill(self) -> None:
        """The process and its children end; their connections close."""
        self._process.kill()

    def end_if_stopped(self) -> None:
        """Kill a process that was stopped."""
        if is_stopped(self.pid):
            self.kill()

    def fork(self) -> tuple[int, WorkerLink]:
        """Replace the guide worker: (signal that ended the previous one, or 0; the new one). Raises as
        `wait_loaded`."""
        loaded = self.wait_loaded()
        steps, their_steps = socket.socketpair()
        compiles, their_compiles = socket.socketpair()
        for end in (steps, compiles):
            _limit_sends(end)
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
        link = Connection(steps.detach())
        return status, WorkerLink(link, Connection(compiles.detach()), memory, pid, poll_of(link.fileno()))

    def close(self) -> None:
        """End the process, which ends its children."""
        self.trials.close()
        self._forks.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class GuideProcesses:
    """Starts the processes when they are first needed, and replaces those that have ended. Shared by the engine's
    thread and the one that computes steps."""

    def __init__(self, start: Callable[[], TemplateLink]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._template: TemplateLink | None = None
        self._worker: WorkerLink | None = None
        self.forks = 0
        """Guide workers forked since the start."""

    def template(self, lost: TemplateLink | None = None) -> TemplateLink:
        """The current template process. A new one is started if none runs, or if the current one is
        `lost`, which has ended. Raises GuidesLostError."""
        with self._lock:
            return self._current_template(lost)

    def template_if_ready(self, lost: TemplateLink | None = None) -> TemplateLink | None:
        """Like `template`, but None until the process is ready. Never waits. Raises GuidesLostError."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            found = self._current_template(lost)
            return found if found.is_ready() else None
        finally:
            self._lock.release()

    def worker(self, lost: WorkerLink | None = None) -> tuple[int, WorkerLink]:
        """(signal that ended `lost`, or 0 if unknown; the current guide worker). If none runs, or `lost` is the current
        one, a new one is forked, and `lost` is killed if it still runs. Raises GuidesLostError."""
        with self._lock:
            if self._worker is not None and self._worker is not lost:
                return 0, self._worker
            template = None
            for _ in range(STARTS):
                template = self._current_template(template)
                with suppress(OSError, EOFError):
                    status, found = template.fork()
                    # The previous link is not closed here, because the other thread may be reading from it: its sockets
                    # are closed with the last reference.
                    self._worker = found
                    self.forks += 1
                    return status, found
            raise GuidesLostError("the guide worker cannot be started")

    def current(self) -> WorkerLink | None:
        return self._worker

    @property
    def generation(self) -> int:
        """Number of the current guide worker; 0 if no worker runs."""
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
        """Raises GuidesLostError if the process ended because the tokenizer cannot be used: another one would fail the
        same way."""
        with suppress(EOFError, OSError):
            ended.wait_loaded()


def _limit_sends(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_SECONDS))


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
