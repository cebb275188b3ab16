"""A rank that follows: it computes what rank 0 tells it to.

As `python -m engine_worker.parallel.follower RANK SIZE MEMORY BELL LOG_LEVEL` rank 0 starts it, with two file
descriptors.
"""

import select
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import NoReturn

import msgspec
import torch
from structlog.stdlib import BoundLogger
from torch.distributed.distributed_c10d import Store

from engine_worker.parallel.channel import LOST, ChannelError, Receiver
from engine_worker.parallel.commands import Compute, Load, Stop, decode
from engine_worker.parallel.group import Group, find_store, given_store, store_errors
from engine_worker.parallel.rank_env import Place
from engine_worker.parallel.shm_channel import Memory, RingReader
from engine_worker.parallel.tcp import INVITATION, connect
from engine_worker.parallel.wakeup import Bell
from engine_worker.runner.forward import Forward
from engine_worker.runner.load import find_device, load_forward
from sluice.ring.checkpoint import CheckpointError, open_checkpoint
from sluice.ring.process import die_with_parent
from sluice.telemetry import configure
from sluice.telemetry.output import leave, protect_stderr

HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)
GRACE_SECONDS = 5.0
"""Rank 0 has gone: to hear its last words, or where it failed for the same reason to let it say so."""
FIRST_SECONDS = 600.0
"""For the first command."""


def main() -> None:
    """A child of rank 0's. Exit status 0 after a Stop."""
    protect_stderr()
    die_with_parent(signal.SIGKILL)
    rank, size, memory, bell = map(int, sys.argv[1:5])
    end = socket.socket(fileno=bell)
    watch_hangup(end.fileno())
    log = configure("engine_worker", sys.argv[5], exception_texts=True).bind(rank=rank)
    place = Place(rank, size, rank, size)
    leave(Follower(RingReader(Memory(memory, size - 1), rank, Bell(end)), place, log).run())


def follow(place: Place, start_seconds: float, log: BoundLogger) -> NoReturn:
    """A process that torchrun started, until its end. Raises ChannelError."""
    store = given_store(start_seconds)
    with store_errors("rank 0 has not come"):
        invitation = store.get(INVITATION).decode()
    receiver = connect(invitation, place.rank, start_seconds)
    watch_hangup(receiver.fileno())
    leave(Follower(receiver, place, log.bind(rank=place.rank), store).run())


def watch_hangup(descriptor: int) -> None:
    """End this process soon after the other end of a socket has gone, whatever it waits for then."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, HANGUP)
        poll.poll()
        time.sleep(GRACE_SECONDS)
        leave(LOST)

    threading.Thread(target=watch, name="hangup", daemon=True).start()


class Follower:
    """The loop."""

    def __init__(self, receiver: Receiver, place: Place, log: BoundLogger, store: Store | None = None) -> None:
        """`store`: the group's, where there is one already."""
        self._receiver = receiver
        self._place = place
        self._log = log
        self._store = store
        self._seconds = FIRST_SECONDS
        self._group: Group | None = None

    def run(self) -> int:
        """Until a Stop; returns the exit status."""
        # Rank 0 drains, and then says when to end.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        try:
            self._follow()
        except (ChannelError, msgspec.DecodeError) as error:
            self._log.error("lead_lost", error=str(error))
            return LOST
        except (CheckpointError, ValueError) as error:
            self._log.error("not_loaded", error=str(error))
            # Rank 0 may say the same, and better.
            time.sleep(GRACE_SECONDS)
            return LOST
        except Exception:  # noqa: BLE001 - whatever it was, the group cannot go on
            self._log.exception("rank_failed")
            return LOST
        return 0

    @torch.inference_mode()
    def _follow(self) -> None:
        forward: Forward | None = None
        while True:
            command = decode(self._receiver.receive(self._seconds))
            match command:
                case Load():
                    forward = self._load(command)
                    self._seconds = command.silent_seconds
                case Compute(moves, arrays) if forward is not None:
                    forward.logits(moves, None if arrays is None else forward.prepare(arrays))
                case Stop():
                    break
            self._receiver.finish()
        if forward is not None:
            forward.close()
        if self._group is not None:
            self._group.close()

    def _load(self, load: Load) -> Forward:
        place, seconds = self._place, load.start_seconds
        checkpoint = open_checkpoint(load.model, revision=load.revision)
        if checkpoint.fingerprint != load.fingerprint:
            raise CheckpointError(f"{checkpoint.path} holds other files here than where rank 0 is")
        config = replace(load.config, device_index=place.rank_here, ranks_here=place.size_here)
        store = find_store(load.store, place.size, seconds) if load.store else self._store
        if store is None:
            raise ChannelError("rank 0 named no store")
        self._group = Group(place.rank, place.size, find_device(config), store, seconds)
        forward = load_forward(checkpoint, config, lambda *_: None, self._group)
        self._group.meet()
        return forward


if __name__ == "__main__":
    main()
