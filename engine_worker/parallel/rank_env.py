"""Which rank this process is, of how many, and who started them."""

from collections.abc import Mapping
from dataclasses import dataclass

GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among its group."""

    rank: int
    size: int
    rank_here: int
    """Among those on this machine."""
    size_here: int
    given: bool = False
    """Whether somebody else, such as torchrun, has started all ranks; else rank 0 starts the others, beside it."""
    master: str = ""
    """Then: the address of rank 0's machine."""


def find_place(tensor_parallel: int, environment: Mapping[str, str]) -> Place:
    """Raises ValueError where the environment asks for another number of ranks."""
    found = {name: environment[name] for name in GIVEN if name in environment}
    alone = tensor_parallel == 1 and found.get("WORLD_SIZE") == "1"
    if alone or not found.keys() >= {"RANK", "WORLD_SIZE"}:
        return Place(0, tensor_parallel, 0, tensor_parallel)
    missing = [name for name in GIVEN if name not in found]
    if missing:
        raise ValueError(f"RANK is set, but {', '.join(missing)} is not: see torchrun")
    rank, size, rank_here, size_here = (int(found[name]) for name in GIVEN[:4])
    if size != tensor_parallel:
        raise ValueError(f"WORLD_SIZE = {size}, but tensor_parallel = {tensor_parallel}")
    return Place(rank, size, rank_here, size_here, True, found["MASTER_ADDR"])
