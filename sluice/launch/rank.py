"""The ranks of an engine on several machines, of which the launcher starts every one."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the `size` processes of an engine."""

    number: int
    size: int
    local: int
    """Number among the ranks on the same node."""
    local_size: int
    """Number of ranks on the same node."""
    master: str = ""
    """IP address of rank 0's machine. Empty until it is known."""
    port: int = 0
    """Port of the store that rank 0 opens on its machine."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that torchrun would set."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
        }


def ranks_per_node(ranks: int, gpus: int) -> int:
    """The largest divisor of `ranks` that fits a node with `gpus` GPUs."""
    return next(per_node for per_node in range(min(ranks, gpus), 0, -1) if ranks % per_node == 0)


def ranks_of(size: int, per_node: int) -> list[Rank]:
    """All `size` ranks of an engine, with `per_node` of them on each node."""
    return [Rank(number, size, number % per_node, per_node) for number in range(size)]
