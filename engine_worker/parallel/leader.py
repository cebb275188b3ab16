"""Rank 0's control of the other ranks: starts them, sends them steps, watches them, and shuts them down.

A group cannot continue without one of its ranks: if a rank is lost this process exits, and with it the whole group. The
launcher restarts the group, and routers recover its streams (docs/architecture.md, "When something dies").
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from structlog.stdlib import BoundLogger
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from engine_worker.lora.device import LoadPlan
from engine_worker.parallel.channel import EXIT_GROUP_LOST, ChannelError, ChannelSender, RankGoneError
from engine_worker.parallel.commands import CallMethod, Command, ComputeStep, LoadModel, Shutdown, encode
from engine_worker.parallel.group import RankGroup, StoredAnswers, open_store, store_errors, torchrun_store
from engine_worker.parallel.rank_env import RankEnv
from engine_worker.parallel.shm_channel import SharedMemory, ShmSender, Wakeup
from engine_worker.parallel.tcp import ENDPOINT_KEY, RankListener, TcpSender
from engine_worker.parallel.watchdog import Watchdog
from engine_worker.runner.batch import StepArrays
from engine_worker.runner.config import RunnerConfig, find_device
from engine_worker.runner.extensions import NO_EXTENSIONS, Extensions
from engine_worker.runner.load import load_runner
from engine_worker.runner.methods import Poll
from engine_worker.runner.runner import ModelRunner
from engine_worker.runner.weights import Progress
from engine_worker.sampling.replicas import ReplicatedSequences, ReplicatedStep
from engine_worker.step import Move
from sluice.checkpoint.folder import Checkpoint
from sluice.host.output import exit_now
from sluice.host.process import PARENT_VARIABLE
from sluice.settings.engine import ProcessorNames
from sluice.wire.calls import MethodCall

END_SECONDS = 5.0
"""Time limit for the ranks to leave the group after a Shutdown, and then for their processes to exit."""
REAP_SECONDS = 1.0
"""Time to wait for the exit status of a process that is ending."""


class Leader:
    """Implements `engine_worker.runner.followers.Followers`."""

    def __init__(
        self,
        rank_env: RankEnv,
        start_seconds: float,
        step_seconds: float,
        log: BoundLogger,
        log_level: str = "info",
        end: Callable[[int], None] = exit_now,
    ) -> None:
        """Starts the other ranks with this log level, or waits for the ranks that torchrun has started. `end`: exits
        this process with a status, even if its threads are blocked. Raises OSError, and ChannelError if a rank does not
        connect."""
        self._rank_env = rank_env
        self._start_seconds = start_seconds
        self._step_seconds = step_seconds
        self._log = log
        self._end = end
        self._group: RankGroup | None = None
        self._runner: ModelRunner | None = None
        """Set once all ranks have loaded."""
        self._processes: Processes | None = None
        self._calls = 0
        self._store: Store
        self._address: str | None = None
        sender: ChannelSender
        if rank_env.external:
            self._store = torchrun_store(start_seconds)
            listener = RankListener(rank_env.master)
            with store_errors("rank 0 cannot publish its endpoint"):
                self._store.set(ENDPOINT_KEY, listener.endpoint)
            sender = TcpSender(listener.accept(rank_env.size, start_seconds), step_seconds)
        else:
            self._processes = Processes(rank_env.size, step_seconds, log_level)
            self._store, self._address = open_store(rank_env.size, start_seconds)
            sender = self._processes.sender
        self._sender = sender
        # Started now, since a rank may already die while it loads.
        self._watchdog = Watchdog(
            sender,
            rank_env.size,
            self._exit_reason,
            self._end_group,
            self._has_loaded,
            self._waiting_since,
            start_seconds,
            step_seconds,
        )
        self._watchdog.start()

    def load(
        self,
        model: str,
        checkpoint: Checkpoint,
        config: RunnerConfig,
        progress: Progress,
        capturing: Progress,
        revision: str | None = None,
        processors: ProcessorNames | None = None,
        extensions: Extensions = NO_EXTENSIONS,
    ) -> ModelRunner:
        """Load each rank's shard. `processors`: logits processors that the other ranks call too, if any. See
        `load_runner`; also raises ChannelError."""
        env, seconds = self._rank_env, self._start_seconds
        # Check the last local rank's device here: with too few GPUs this error is clearer than the loss of a rank.
        find_device(replace(config, device_index=env.local_size - 1, ranks_here=env.local_size))
        self._send(
            LoadModel(
                model,
                checkpoint.fingerprint,
                config,
                self._address,
                seconds,
                self._step_seconds,
                revision,
                processors,
            )
        )
        config = replace(config, device_index=env.local_rank, ranks_here=env.local_size)
        self._group = RankGroup(env.rank, env.size, find_device(config), self._store, seconds)
        if processors is not None:
            extensions = replace(extensions, replicated=ReplicatedSequences())
        runner = load_runner(
            checkpoint, config, progress, self._group, self, capturing, self._warn, extensions=extensions
        )
        runner.choices["tensor_parallel"] = str(env.size)
        self._group.barrier()
        self._runner = runner
        return runner

    def _warn(self, event: str, reason: str) -> None:
        self._log.warning(event, reason=reason)

    def send_step(
        self,
        moves: tuple[Move, ...],
        arrays: StepArrays | None,
        processed: ReplicatedStep | None,
        loads: tuple[LoadPlan, ...] = (),
    ) -> None:
        self._send(ComputeStep(moves, None if arrays is None else without_rows(arrays), processed, loads))

    def send_rows(self, logits: Tensor, followed: Sequence[int]) -> None:
        if self._group is not None:
            self._group.broadcast(torch.tensor(followed, device=logits.device))
            self._group.broadcast(logits)

    def call(self, call: MethodCall) -> Poll:
        self._calls += 1
        sent = self._send(CallMethod(self._calls, call))
        ranks = [rank for rank in range(1, self._rank_env.size) if call.names(rank)]
        return StoredAnswers(self._store, self._sender, self._calls, sent, ranks).poll

    def on_step_failed(self, error: Exception) -> None:
        self._end_group(f"rank 0 failed: {error!r}")

    def close(self) -> None:
        """Shut the other ranks down and wait for them, with a time limit; kill them if the model was never loaded."""
        # Stopped first, since ranks that are shut down would look lost.
        self._watchdog.stop()
        if self._runner is not None:
            # In a thread, since a collective with a rank that hangs never returns.
            shutdown = threading.Thread(target=self._shut_down, args=(self._runner,), name="shutdown", daemon=True)
            shutdown.start()
            shutdown.join(END_SECONDS)
            if shutdown.is_alive():
                self._end_group(f"the ranks have not left the group in {END_SECONDS:g} s")
        if self._processes is not None:
            self._processes.end(END_SECONDS if self._runner is not None else 0.0)
        self._sender.close()

    def _shut_down(self, runner: ModelRunner) -> None:
        """All ranks leave the group, each after it has dropped its graphs; see `Forward.close`."""
        try:
            self._sender.send(encode(Shutdown()))
            runner.close()
            if self._group is not None:
                self._group.close()
        except (ChannelError, RuntimeError) as error:
            self._log.warning("shutdown_failed", error=str(error))

    def _send(self, command: Command) -> int:
        """Send a command and return its number. Ends the group if that fails."""
        try:
            return self._sender.send(encode(command))
        except RankGoneError as error:
            self._end_group(f"rank {error.rank} {self._exit_reason(error.rank) or 'has disconnected'}")
        except ChannelError as error:
            self._end_group(str(error))
        return self._sender.sent

    def _has_loaded(self) -> bool:
        return self._runner is not None

    def _waiting_since(self) -> float | None:
        return None if self._runner is None else self._runner.waiting_since

    def _exit_reason(self, rank: int) -> str | None:
        return None if self._processes is None else self._processes.exit_reason(rank)

    def _end_group(self, reason: str) -> None:
        self._log.error("rank_lost", error=reason)
        if self._processes is not None:
            self._processes.kill()
        self._end(EXIT_GROUP_LOST)


def without_rows(arrays: StepArrays) -> StepArrays:
    """Drop the rows of prompt tables, which may be too large for the channel: they are broadcast within the step."""
    return arrays if arrays.virtual_rows is None else replace(arrays, virtual_rows=None)


class Processes:
    """The child processes of the other ranks on this machine. They are killed when the thread that started them ends,
    however this process ends."""

    def __init__(self, size: int, seconds: float, log_level: str) -> None:
        """`seconds`: see `ShmSender`. Raises OSError if a child cannot be started."""
        descriptor = SharedMemory.create(size - 1)
        wakeups = []
        self._children: list[subprocess.Popen[bytes]] = []
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment = {
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
            **os.environ,
            # -P drops the working directory from the module path, so pass on this process's path.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            PARENT_VARIABLE: str(os.getpid()),
        }
        # Rank 0 is a member of the group too.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = environment[name]
        try:
            for rank in range(1, size):
                parent_end, child_end = socket.socketpair()
                wakeups.append(Wakeup(parent_end))
                with child_end:
                    arguments = map(str, (rank, size, descriptor, child_end.fileno(), log_level))
                    self._children.append(
                        subprocess.Popen(
                            [sys.executable, "-P", "-m", "engine_worker.parallel.follower", *arguments],
                            stdin=subprocess.DEVNULL,
                            env=environment,
                            # Ctrl-C in the terminal reaches only this process, which then ends the children.
                            process_group=0,
                            pass_fds=(descriptor, child_end.fileno()),
                        )
                    )
            self.sender = ShmSender(SharedMemory(descriptor, size - 1), wakeups, seconds)
        except OSError:
            self.kill()
            raise
        finally:
            os.close(descriptor)

    def exit_reason(self, rank: int) -> str | None:
        """How this rank's process ended, after waiting up to REAP_SECONDS for that; None if it is still running."""
        with suppress(subprocess.TimeoutExpired):
            # A closed connection can be noticed before the process has ended: wait a moment for its exit status.
            code = self._children[rank - 1].wait(REAP_SECONDS)
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return None

    def end(self, seconds: float) -> None:
        """Wait for the children to end; after `seconds`, kill those that are still running."""
        end = time.monotonic() + seconds
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL, which also ends stopped processes, and wait."""
        # Kill all children before the first wait, so that no rank continues alone.
        for child in self._children:
            child.kill()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(REAP_SECONDS)
