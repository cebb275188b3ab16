"""Which GPUs each engine of a ring computes on."""

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


@dataclass(frozen=True, slots=True)
class Gpus:
    """Those of one engine."""

    names: tuple[str, ...]
    """Numbers, or ids of GPUs or of MIG slices, as CUDA_VISIBLE_DEVICES has them."""
    engines: int = 1
    """How many engines are on each of them."""

    @property
    def environment(self) -> dict[str, str]:
        """So that the engine sees no others."""
        return {VISIBLE: ",".join(self.names)}


def gpus_of_engines(engines: int, settings: EngineSettings, environment: Mapping[str, str]) -> list[Gpus]:
    """For each engine; empty where they compute on the CPU, or nobody can tell which GPUs there are.

    Raises OptionsError where there are too few.
    """
    if settings.device == "cpu":
        return []
    return deal(visible_gpus(environment), engines, settings.tensor_parallel)


def deal(names: Sequence[str], engines: int, ranks: int) -> list[Gpus]:
    """To each engine the next `ranks` of them. Engines of one rank take turns where there are more than GPUs.

    Raises OptionsError where there are too few for the others.
    """
    if not names:
        return []
    if ranks == 1:
        turns = [names[i % len(names)] for i in range(engines)]
        on = Counter(turns)
        return [Gpus((name,), on[name]) for name in turns]
    if engines * ranks > len(names):
        raise OptionsError(
            f"engines = {engines} with tensor_parallel = {ranks} need {engines * ranks} GPUs, "
            f"but {len(names)} are visible: {','.join(names)}"
        )
    return [Gpus(tuple(names[i * ranks : (i + 1) * ranks])) for i in range(engines)]


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names; else all that nvidia-smi lists, none where it is not installed or finds none.

    Raises OptionsError where nvidia-smi does not answer.
    """
    named = environment.get(VISIBLE)
    if named is None:
        return _listed_gpus()
    # As for CUDA, whatever comes after one that is no GPU, such as -1, does not count.
    return tuple(takewhile(lambda name: name and name[0] != "-", (name.strip() for name in named.split(","))))


def _listed_gpus() -> tuple[str, ...]:
    program = shutil.which(LIST[0])
    if program is None:
        return ()
    try:
        done = subprocess.run(
            [program, *LIST[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIST_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptionsError(f"nvidia-smi does not tell which GPUs there are ({error}): set {VISIBLE}") from error
    return tuple(done.stdout.split()) if done.returncode == 0 else ()
