"""Ranks in processes of their own, joined by torch.distributed: NCCL between GPUs, gloo between CPUs."""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from engine_worker.layers.shard import Shard

LOOPBACK = "127.0.0.1"


class Group(Shard):
    """This process's place among them. One per process: torch keeps the group."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, seconds: float) -> None:
        """Waits until all have joined. Raises torch's errors where they have not in `seconds`, in which also whatever
        they exchange has to be through."""
        self.rank = rank
        self.size = size
        self._device = device
        gpu = device.type == "cuda"
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

    def close(self) -> None:
        """Leave it."""
        dist.destroy_process_group()


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
    """Another rank's way to it."""
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=seconds)
    store: Store = TCPStore(host, int(port), size, is_master=False, timeout=limit, wait_for_workers=False)
    return store


def given_store(seconds: float) -> Store:
    """That of whoever started the ranks, by MASTER_ADDR and MASTER_PORT in the environment, as torchrun sets them."""
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    return store
