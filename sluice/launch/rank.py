"""Which rank of its engine a process is, where the launcher starts every rank itself."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `size` processes that compute one engine."""

    number: int
    size: int
    local: int
    """Among the ranks that share its GPUs."""
    local_size: int
    master: str = ""
    """IP of rank 0's machine; empty until it is known."""
    port: int = 0
    """Of the store that rank 0 opens there."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of torchrun."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
        }


def ranks_per_node(ranks: int, most: int) -> int:
    """The largest equal share that fits a node of `most` GPUs."""
    return next(share for share in range(min(ranks, most), 0, -1) if ranks % share == 0)


def ranks_of(size: int, share: int) -> list[Rank]:
    """All ranks of an engine, `share` of them on each node."""
    return [Rank(number, size, number % share, share) for number in range(size)]
