"""Ranks in processes of their own, joined by torch.distributed: NCCL between GPUs, gloo between CPUs."""

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


class Group(Shard):
    """This process's place among them. One per process: torch keeps the group."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, seconds: float) -> None:
        """Waits until all have joined. Raises ChannelError where they have not in `seconds`, in which also whatever
        they exchange has to be through."""
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
                # NCCL connects now rather than in the first step.
                device_id=device if gpu else None,
            )

    def reduce(self, x: Tensor) -> Tensor:
        """See Shard."""
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See Shard."""
        x = x.contiguous()
        if self.rank:
            dist.gather(x, dst=0)
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.gather(x, parts, dst=0)
        return torch.cat(parts, dim=1)

    def share(self, x: Tensor) -> None:
        """See Shard."""
        dist.broadcast(x, src=0)

    def least(self, number: int) -> int:
        """See Shard."""
        found = torch.tensor([number], device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def meet(self) -> None:
        """Wait until all have come here."""
        self.least(0)

    def close(self) -> None:
        """Leave it, all together. With NCCL that waits until each graph that captured an exchange has gone."""
        dist.destroy_process_group()


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Errors of torch's store and of its groups as ChannelError; `what` has failed."""
    try:
        yield
    except dist.DistError as error:
        raise ChannelError(f"{what}: {str(error).partition(chr(10))[0]}") from error


def open_store(size: int, seconds: float) -> tuple[Store, str]:
    """Rank 0's, for ranks on this machine: on a port of loopback that the system chooses; and its address."""
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


def find_store(address: str, size: int, seconds: float) -> Store:
    """Another rank's way to it. Raises ChannelError."""
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=seconds)
    with store_errors(f"no store at {address}"):
        store: Store = TCPStore(host, int(port), size, is_master=False, timeout=limit, wait_for_workers=False)
    return store


def given_store(seconds: float) -> Store:
    """That of whoever started the ranks, by MASTER_ADDR and MASTER_PORT in the environment, as torchrun sets them.
    torchrun's own outlives its ranks: what those before them wrote is not seen. Raises ChannelError."""
    with store_errors("no store at MASTER_ADDR and MASTER_PORT"):
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    found: Store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return found
