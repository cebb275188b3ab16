"""Assigns GPUs to the engines of a ring, and ranks to the processes of an engine on several machines."""

import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from sluice.launch.errors import OptionsError
from sluice.settings.services import EngineSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIST = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
LIST_SECONDS = 60.0
"""Timeout of nvidia-smi, which can take many seconds if it has to load the driver first."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one engine."""

    names: tuple[str, ...]
    """Numbers, or ids of GPUs or MIG slices, as in CUDA_VISIBLE_DEVICES."""
    engines: int = 1
    """Number of engines that share each of these GPUs."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make only these GPUs visible to the engine."""
        return {VISIBLE: ",".join(self.names)}


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the `size` processes of an engine, all of which the launcher starts."""

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


def gpus_of_engines(engines: int, settings: EngineSettings, environment: Mapping[str, str]) -> list[Gpus]:
    """The GPUs of each engine. Empty if engines run on the CPU or no GPUs are found.

    Raises OptionsError if there are too few GPUs.
    """
    if settings.device == "cpu":
        return []
    return assign_gpus(visible_gpus(environment), engines, settings.tensor_parallel)


def assign_gpus(names: Sequence[str], engines: int, ranks: int) -> list[Gpus]:
    """The GPUs of each engine: consecutive `ranks` of `names`.

    Engines of one rank share GPUs if there are too few. Raises OptionsError if there are too few for several ranks.
    """
    if not names:
        return []
    # Ranks of one engine cannot share a GPU, because NCCL refuses that.
    if ranks == 1:
        assigned = [names[i % len(names)] for i in range(engines)]
        engines_on = Counter(assigned)
        return [Gpus((name,), engines_on[name]) for name in assigned]
    if engines * ranks > len(names):
        raise OptionsError(
            f"{engines} engines with tensor_parallel = {ranks} need {engines * ranks} GPUs, "
            f"but {len(names)} are visible: {','.join(names)}"
        )
    return [Gpus(tuple(names[i * ranks : (i + 1) * ranks])) for i in range(engines)]


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs in CUDA_VISIBLE_DEVICES if it is set, otherwise all that nvidia-smi lists.

    Empty if nvidia-smi is not installed or fails. Raises OptionsError if it hangs or cannot be run.
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        return _listed_gpus()
    # As in CUDA, an invalid entry such as -1 hides all entries after it.
    return tuple(takewhile(lambda name: name and name[0] != "-", (name.strip() for name in visible.split(","))))


def _listed_gpus() -> tuple[str, ...]:
    program = shutil.which(LIST[0])
    if program is None:
        return ()
    try:
        done = subprocess.run(
            [program, *LIST[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIST_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptionsError(f"nvidia-smi cannot list the GPUs ({error}); name them in {VISIBLE}") from error
    return tuple(done.stdout.split()) if done.returncode == 0 else ()


def ranks_per_node(ranks: int, gpus: int) -> int:
    """The largest divisor of `ranks` that fits a node with `gpus` GPUs."""
    return next(per_node for per_node in range(min(ranks, gpus), 0, -1) if ranks % per_node == 0)


def ranks_of(size: int, per_node: int) -> list[Rank]:
    """All `size` ranks of an engine, with `per_node` of them on each node."""
    return [Rank(number, size, number % per_node, per_node) for number in range(size)]
