"""A tensor-parallel group of processes, joined by torch.distributed: NCCL between GPUs, gloo between CPUs."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from engine_worker.layers.shard import Shard
from engine_worker.parallel.channel import ChannelError

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
        found = torch.tensor([number], device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

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
    found: Store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return found
