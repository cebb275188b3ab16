"""Rank 0's hold on the others: it starts them, tells them what to compute, watches them, and ends them.

Nothing goes on without one of them: where a rank is lost this process ends too, and with it the whole group. Whoever
started it starts it again, and what it served goes on by itself (docs/architecture.md, "When something dies").
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from structlog.stdlib import BoundLogger
from torch.distributed.distributed_c10d import Store

from engine_worker.parallel.channel import LOST, ChannelError, GoneError, Sender
from engine_worker.parallel.commands import Command, Compute, Load, Stop, encode
from engine_worker.parallel.group import Group, given_store, open_store, store_errors
from engine_worker.parallel.processes import Processes
from engine_worker.parallel.rank_env import Place
from engine_worker.parallel.tcp import INVITATION, Listener, TcpSender
from engine_worker.parallel.watch import Watch
from engine_worker.runner.arrays import Arrays
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import find_device, load_runner
from engine_worker.runner.runner import ModelRunner
from engine_worker.runner.weights import Progress
from engine_worker.step import Move, Runner
from sluice.ring.checkpoint import Checkpoint
from sluice.telemetry.output import leave

END_SECONDS = 5.0
"""For the group to end, once the others have been told, and again for their processes."""


class Lead:
    """See `engine_worker.runner.runner.Ranks`."""

    def __init__(
        self,
        place: Place,
        start_seconds: float,
        step_seconds: float,
        log: BoundLogger,
        log_level: str = "info",
        end: Callable[[int], None] = leave,
    ) -> None:
        """Starts the other ranks, which log from `log_level` on, or finds them where torchrun has. `end`: ends this
        process with a status, whatever its threads wait for. Raises OSError, and ChannelError where they do not
        come."""
        self._place = place
        self._start_seconds = start_seconds
        self._step_seconds = step_seconds
        self._log = log
        self._end = end
        self._group: Group | None = None
        self._runner: ModelRunner | None = None
        """Once all have loaded."""
        self._processes: Processes | None = None
        self._store: Store
        self._address: str | None = None
        sender: Sender
        if place.given:
            self._store = given_store(start_seconds)
            listener = Listener(place.master)
            with store_errors("rank 0 cannot be announced"):
                self._store.set(INVITATION, listener.invitation)
            sender = TcpSender(listener.accept(place.size, start_seconds), step_seconds)
        else:
            self._processes = Processes(place.size, step_seconds, log_level)
            self._store, self._address = open_store(place.size, start_seconds)
            sender = self._processes.sender
        self._sender = sender
        self._watch = Watch(
            sender, place.size, self._ended, self._lose, self._waiting_since, start_seconds, step_seconds
        )
        self._watch.start()

    def load(
        self,
        model: str,
        checkpoint: Checkpoint,
        config: RunnerConfig,
        progress: Progress,
        capturing: Progress,
        revision: str | None = None,
    ) -> Runner:
        """Every rank its shard. See `load_runner`; raises ChannelError too."""
        place, seconds = self._place, self._start_seconds
        # The last rank here has a GPU too, or the reason is told before others meet it.
        find_device(replace(config, device_index=place.size_here - 1, ranks_here=place.size_here))
        self._send(Load(model, checkpoint.fingerprint, config, self._address, seconds, self._step_seconds, revision))
        config = replace(config, device_index=place.rank_here, ranks_here=place.size_here)
        self._group = Group(place.rank, place.size, find_device(config), self._store, seconds)
        runner = load_runner(checkpoint, config, progress, self._group, self, capturing, self._warn)
        runner.choices["tensor_parallel"] = str(place.size)
        self._group.meet()
        self._runner = runner
        return runner

    def _warn(self, event: str, because: str) -> None:
        self._log.warning(event, because=because)

    def tell(self, moves: tuple[Move, ...], arrays: Arrays | None) -> None:
        """See `Ranks`."""
        self._send(Compute(moves, arrays))

    def lose(self, error: Exception) -> None:
        """See `Ranks`."""
        self._lose(f"rank 0 failed: {error!r}")

    def close(self) -> None:
        """End the others, and wait for that, but not without limit; at once where the model was not loaded."""
        self._watch.stop()
        if self._runner is not None:
            parting = threading.Thread(target=self._part, args=(self._runner,), name="parting", daemon=True)
            parting.start()
            parting.join(END_SECONDS)
            if parting.is_alive():
                self._lose(f"the ranks have not parted in {END_SECONDS:g} s")
        if self._processes is not None:
            self._processes.end(END_SECONDS if self._runner is not None else 0.0)
        self._sender.close()

    def _part(self, runner: ModelRunner) -> None:
        """All ranks leave the group, each once its graphs have gone."""
        try:
            self._sender.send([encode(Stop())])
            runner.close()
            if self._group is not None:
                self._group.close()
        except (ChannelError, RuntimeError) as error:
            self._log.warning("rank_gone", error=str(error))

    def _send(self, command: Command) -> None:
        try:
            self._sender.send([encode(command)])
        except GoneError as error:
            self._lose(f"rank {error.rank} {self._ended(error.rank) or 'has gone'}")
        except ChannelError as error:
            self._lose(str(error))

    def _waiting_since(self) -> float | None:
        return None if self._runner is None else self._runner.waiting_since

    def _ended(self, rank: int) -> str | None:
        return None if self._processes is None else self._processes.ending(rank)

    def _lose(self, why: str) -> None:
        """The group ends."""
        self._log.error("rank_lost", error=why)
        if self._processes is not None:
            self._processes.kill()
        self._end(LOST)
