"""A tensor-parallel group of processes, joined by torch.distributed (NCCL for GPUs, gloo for CPUs), and its store.

The answers of the other ranks to a method call go through the store, because the channel only goes from rank 0 to the
other ranks. A rank stores its answer before it reports the command as completed, so rank 0 never waits for the store.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from engine_worker.layers.shard import Shard
from engine_worker.parallel.channel import ChannelError, ChannelSender
from sluice.wire.calls import RankAnswer, failed

LOOPBACK = "127.0.0.1"


class RankGroup(Shard):
    """This process's membership in its group. At most one per process, since torch stores the group globally."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, seconds: float) -> None:
        """Waits until all ranks have joined. `seconds`: time limit for joining, and for each collective after that.
        Raises ChannelError."""
        self.rank = rank
        self.size = size
        self._device = device
        gpu = device.type == "cuda"
        with store_errors("the ranks have not joined"):
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=seconds),
                # If a device is given, NCCL connects now instead of in the first step.
                device_id=device if gpu else None,
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.rank:
            dist.gather(x, dst=0)
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.gather(x, parts, dst=0)
        return torch.cat(parts, dim=1)

    def broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)

    def all_min(self, number: int) -> int:
        smallest = torch.tensor([number], device=self._device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.all_min(0)

    def close(self) -> None:
        """Leave the group, as all ranks must together. NCCL waits here for every graph that captured a collective."""
        dist.destroy_process_group()


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Convert errors of torch's stores and groups to ChannelError. `what`: what has failed."""
    try:
        yield
    except dist.DistError as error:
        raise ChannelError(f"{what}: {str(error).partition(chr(10))[0]}") from error


def open_store(size: int, seconds: float) -> tuple[Store, str]:
    """Rank 0's store for ranks on this machine, and its address: a loopback port that the system picks."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    store: Store = TCPStore(
        LOOPBACK,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, f"{LOOPBACK}:{port}"


def connect_store(address: str, size: int, seconds: float) -> Store:
    """Another rank's connection to the store of `open_store`. Raises ChannelError."""
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=seconds)
    with store_errors(f"no store at {address}"):
        store: Store = TCPStore(host, int(port), size, is_master=False, timeout=limit, wait_for_workers=False)
    return store


def torchrun_store(seconds: float) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, which torchrun sets. Raises ChannelError."""
    with store_errors("no store at MASTER_ADDR and MASTER_PORT"):
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    # torchrun's store outlives the ranks: a prefix per restart hides the keys of earlier ranks.
    prefixed: Store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return prefixed


def store_answer(store: Store, number: int, rank: int, answer: RankAnswer) -> None:
    """Store this rank's answer to call `number` for rank 0. Called on the other ranks. Raises DistError."""
    store.set(_key(number, rank), msgspec.json.encode(answer).decode())


class StoredAnswers:
    """The answers to one call, on rank 0."""

    def __init__(self, store: Store, sender: ChannelSender, number: int, sent: int, ranks: Sequence[int]) -> None:
        """`number`: number of the call. `sent`: number of its command on the channel. `ranks`: the ranks that the call
        names, without 0."""
        self._store = store
        self._sender = sender
        self._number = number
        self._sent = sent
        self._ranks = ranks

    def poll(self) -> list[RankAnswer] | None:
        """The answers, one per rank, once all ranks have completed the command; None before that."""
        if any(self._sender.completed(rank) < self._sent for rank in self._ranks):
            return None
        return [self._pop(rank) for rank in self._ranks]

    def _pop(self, rank: int) -> RankAnswer:
        key = _key(self._number, rank)
        try:
            if not self._store.check([key]):
                return failed(rank, "its answer was lost; it may have run the method")
            answer = msgspec.json.decode(self._store.get(key), type=RankAnswer)
            self._store.delete_key(key)
        except (DistError, msgspec.MsgspecError) as error:
            return failed(rank, f"its answer cannot be read: {error}")
        return answer


def _key(number: int, rank: int) -> str:
    return f"sluice/call/{number}/{rank}"
