"""This process's rank, the size of its group, and whether torchrun has started the ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class RankEnv:
    """This process's rank in its group."""

    rank: int
    size: int
    local_rank: int
    """This process's index among the ranks on its machine."""
    local_size: int
    external: bool = False
    """Whether a launcher such as torchrun has started all ranks; if not, rank 0 starts the other ranks on this
    machine."""
    master: str = ""
    """Address of rank 0's machine, if external."""


def read_rank_env(tensor_parallel: int, environment: Mapping[str, str]) -> RankEnv:
    """Read torchrun's variables, if they are set. Raises ValueError if some are missing, or if their number of ranks is
    not `tensor_parallel`."""
    found = {name: environment[name] for name in TORCHRUN_VARIABLES if name in environment}
    alone = tensor_parallel == 1 and found.get("WORLD_SIZE") == "1"
    if alone or not found.keys() >= {"RANK", "WORLD_SIZE"}:
        return RankEnv(0, tensor_parallel, 0, tensor_parallel)
    missing = [name for name in TORCHRUN_VARIABLES if name not in found]
    if missing:
        raise ValueError(f"RANK is set, but not {', '.join(missing)}; torchrun sets all of them")
    rank, size, local_rank, local_size = (int(found[name]) for name in TORCHRUN_VARIABLES[:4])
    if size != tensor_parallel:
        raise ValueError(f"WORLD_SIZE = {size}, but tensor_parallel = {tensor_parallel}")
    return RankEnv(rank, size, local_rank, local_size, True, found["MASTER_ADDR"])
