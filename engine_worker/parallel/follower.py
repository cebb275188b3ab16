"""The process of a rank other than 0, which executes the commands of rank 0.

Rank 0 starts it as `python -m engine_worker.parallel.follower RANK SIZE MEMORY WAKEUP LOG_LEVEL`, where MEMORY and
WAKEUP are inherited file descriptors.
"""

import gc
import signal

from sluice.host.process import die_with_parent

if __name__ == "__main__":
    # Before the imports below, which take seconds: rank 0 may end meanwhile. Not SIGTERM, which is ignored later.
    die_with_parent(signal.SIGKILL)
    # While importing, the garbage collector would scan all modules repeatedly, for a sixth of the time. `main` enables
    # it again.
    gc.disable()

import select
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from structlog.stdlib import BoundLogger
from torch.distributed.distributed_c10d import Store

from engine_worker.parallel.channel import EXIT_GROUP_LOST, ChannelError, ChannelReceiver
from engine_worker.parallel.commands import CallMethod, ComputeStep, LoadModel, Shutdown, decode
from engine_worker.parallel.group import RankGroup, connect_store, store_answer, store_errors, torchrun_store
from engine_worker.parallel.rank_env import RankEnv
from engine_worker.parallel.shm_channel import SharedMemory, ShmReceiver, Wakeup
from engine_worker.parallel.tcp import ENDPOINT_KEY, connect
from engine_worker.runner.config import find_device
from engine_worker.runner.load import load_forward
from engine_worker.runner.methods import Methods
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.sampling.processors import NO_PROCESSORS, find_processors
from engine_worker.sampling.replicas import ReplicatedProcessors, ReplicatedStep
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.host.output import exit_now, protect_stderr
from sluice.telemetry.logs import configure
from sluice.wire.calls import RankAnswer

# POLLHUP needs both directions closed; Linux can also report that only the peer has closed.
HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)
GRACE_SECONDS = 5.0
"""Time between rank 0's disconnection and this process's exit: to read the last commands, and to let rank 0 log the
cause first if it failed for the same reason."""
FIRST_SECONDS = 600.0
"""Time limit for the first command, which sets the limit for all later ones."""


def main() -> None:
    """Run as a child process of rank 0. Exit status 0 after a Shutdown."""
    gc.freeze()
    gc.enable()
    protect_stderr()
    leave_signals_to_rank_0()
    rank, size, memory, wakeup = map(int, sys.argv[1:5])
    end = socket.socket(fileno=wakeup)
    watch_hangup(end.fileno())
    log = configure("engine_worker", sys.argv[5], exception_texts=True).bind(rank=rank)
    rank_env = RankEnv(rank, size, rank, size)
    exit_now(Follower(ShmReceiver(SharedMemory(memory, size - 1), rank, Wakeup(end)), rank_env, log).run())


def follow(rank_env: RankEnv, start_seconds: float, log: BoundLogger) -> NoReturn:
    """Run as a rank that a launcher such as torchrun has started, until the process ends. Raises ChannelError."""
    # If the launcher ends. Not SIGTERM, which is ignored later.
    die_with_parent(signal.SIGKILL)
    store = torchrun_store(start_seconds)
    with store_errors("rank 0 has not joined"):
        endpoint = store.get(ENDPOINT_KEY).decode()
    receiver = connect(endpoint, rank_env.rank, start_seconds)
    watch_hangup(receiver.fileno())
    exit_now(Follower(receiver, rank_env, log.bind(rank=rank_env.rank), store).run())


def watch_hangup(descriptor: int) -> None:
    """End this process GRACE_SECONDS after a socket's peer has disconnected, even if its threads are blocked."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, HANGUP)
        poll.poll()
        time.sleep(GRACE_SECONDS)
        exit_now(EXIT_GROUP_LOST)

    threading.Thread(target=watch, name="hangup", daemon=True).start()


def leave_signals_to_rank_0() -> None:
    """Ignore SIGINT and SIGTERM, on which rank 0 drains and then sends a Shutdown. A rank that torchrun has started
    calls this once its model is loaded; until then the signals end it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class Follower:
    def __init__(
        self, receiver: ChannelReceiver, rank_env: RankEnv, log: BoundLogger, store: Store | None = None
    ) -> None:
        """`store`: the group's store, if torchrun has started it."""
        self._receiver = receiver
        self._rank_env = rank_env
        self._log = log
        self._store = store
        self._seconds = FIRST_SECONDS
        self._group: RankGroup | None = None
        self._methods: Methods | None = None
        """Set once the model is loaded."""
        self._processors = ReplicatedProcessors(NO_PROCESSORS)

    def run(self) -> int:
        """Execute commands until a Shutdown; returns the exit status."""
        try:
            self._follow()
        except (ChannelError, msgspec.DecodeError) as error:
            self._log.error("leader_lost", error=str(error))
            return EXIT_GROUP_LOST
        except (CheckpointError, ValueError) as error:
            self._log.error("load_failed", error=str(error))
            # Rank 0 has probably failed for the same reason: let it log the cause before it notices this exit.
            time.sleep(GRACE_SECONDS)
            return EXIT_GROUP_LOST
        except Exception:  # noqa: BLE001 - after any error of a rank the group cannot continue
            self._log.exception("rank_failed")
            return EXIT_GROUP_LOST
        return 0

    @torch.inference_mode()
    def _follow(self) -> None:
        forward: TorchForward | None = None
        while True:
            command = decode(self._receiver.receive(self._seconds))
            match command:
                case LoadModel():
                    forward = self._load(command)
                    leave_signals_to_rank_0()
                    self._seconds = command.silent_seconds
                case ComputeStep(moves, arrays, processed, loads) if forward is not None:
                    forward.load_adapters(loads)
                    forward.logits(moves, None if arrays is None else forward.prepare(arrays))
                    if processed is not None:
                        self._process(forward, processed)
                case CallMethod(number, call) if self._methods is not None and call.names(self._rank_env.rank):
                    self._store_answer(number, self._methods.answer(call))
                case Shutdown():
                    break
            self._receiver.complete()
        if forward is not None:
            forward.close()
        if self._group is not None:
            self._group.close()

    def _process(self, forward: TorchForward, step: ReplicatedStep) -> None:
        """Call the logits processors with the same arguments as rank 0."""
        count, device = len(step.rows), forward.device
        followed = torch.empty(count, dtype=torch.int64, device=device)
        logits = torch.empty(count, forward.vocab_size, device=device)
        if count:
            forward.shard.broadcast(followed)
            forward.shard.broadcast(logits)
        self._processors.run(step, logits, followed.tolist())

    def _store_answer(self, number: int, answer: RankAnswer) -> None:
        try:
            if self._store is not None:
                store_answer(self._store, number, self._rank_env.rank, answer)
        except dist.DistError as error:
            # Rank 0 reports a missing answer. If the group is lost, receiving the next command fails.
            self._log.warning("answer_lost", error=str(error))

    def _load(self, load: LoadModel) -> TorchForward:
        rank_env, seconds = self._rank_env, load.start_seconds
        # Each machine opens its own copy of the checkpoint; the fingerprint proves that the copies are the same.
        checkpoint = open_checkpoint(load.model, revision=load.revision)
        if checkpoint.fingerprint != load.fingerprint:
            raise CheckpointError(f"{checkpoint.path} has different files on this machine than on rank 0's machine")
        # Before the model, which takes long to load, so that errors are reported early.
        if load.processors is not None:
            self._processors = ReplicatedProcessors(find_processors(load.processors, self._warn))
        config = replace(load.config, device_index=rank_env.local_rank, ranks_here=rank_env.local_size)
        if load.store:
            self._store = connect_store(load.store, rank_env.size, seconds)
        if self._store is None:
            raise ChannelError("rank 0 has sent no address of the group's store, and torchrun has not started one")
        self._group = RankGroup(rank_env.rank, rank_env.size, find_device(config), self._store, seconds)
        forward = load_forward(checkpoint, config, lambda *_: None, self._group)
        self._methods = Methods(forward.rank)
        self._group.barrier()
        return forward

    def _warn(self, event: str, reason: str) -> None:
        self._log.warning(event, reason=reason)


if __name__ == "__main__":
    main()
