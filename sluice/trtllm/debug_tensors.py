"""Debug tensors: arrays of an engine's steps, which the engine writes to files."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.executor.forks import remove_with
from sluice.settings.engine import DEBUG_INPUTS, DEBUG_OUTPUTS, DEBUG_STEP
from sluice.trtllm.config import DebugConfig
from sluice.trtllm.options import OptionError, UnsupportedOptionError
from sluice.trtllm.statistics import DebugTensorsPerIteration

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sluice.trtllm")


def debug_names(config: DebugConfig | None) -> list[str]:
    """Names of the arrays that `config` requests.

    Raises UnsupportedOptionError for an unknown name, OptionError for a negative number of iterations.
    """
    if config is None:
        return []
    if config.debug_tensors_max_iterations < 0:
        value = config.debug_tensors_max_iterations
        raise OptionError(f"DebugConfig.debug_tensors_max_iterations is {value}, must be at least 0")
    named = list(config.debug_tensor_names or ())
    known = (*DEBUG_INPUTS, *DEBUG_OUTPUTS)
    for name in named:
        if name not in known:
            reason = f"unknown tensor; engines can write {', '.join(known)}"
            raise UnsupportedOptionError(f"DebugConfig.debug_tensor_names: {name!r}", reason)
    inputs = DEBUG_INPUTS if config.debug_input_tensors else ()
    outputs = DEBUG_OUTPUTS if config.debug_output_tensors else ()
    return [name for name in known if name in (*named, *inputs, *outputs)]


class DebugFolder:
    """The folder to which the engines of one executor write debug tensors.

    With `max_iterations` above 0, it is a queue of the newest steps, which `close` removes. Otherwise its files stay.
    """

    def __init__(self, names: list[str], max_iterations: int) -> None:
        """Create the folder. Raises OSError."""
        self._path = Path(tempfile.mkdtemp(prefix="sluice_debug_"))
        self._is_queue = max_iterations > 0
        self.engine_args: dict[str, Any] = {"debug_tensors": names, "debug_folder": str(self._path)}
        if self._is_queue:
            self.engine_args["debug_max_steps"] = max_iterations
            # A finalizer, since programs need not shut an executor down.
            self._remove = remove_with(self, self._path)
        else:
            log.warning("writing debug tensors to %s", self._path)

    @staticmethod
    def of(config: DebugConfig | None) -> "DebugFolder | None":
        """Create the folder, unless `config` requests no tensors. Raises like `debug_names`, and OSError."""
        names = debug_names(config)
        return DebugFolder(names, config.debug_tensors_max_iterations) if config is not None and names else None

    def take(self) -> list[DebugTensorsPerIteration]:
        """The newest steps since the last call, oldest first; empty if the folder is not a queue."""
        return list(self._taken()) if self._is_queue else []

    def close(self) -> None:
        """Remove the folder if it is a queue. Call it once no engine runs."""
        if self._is_queue:
            self._remove()

    def _taken(self) -> Iterator[DebugTensorsPerIteration]:
        for step in sorted(self._path.glob(f"*/{DEBUG_STEP}*"), key=lambda path: (path.parent.name, _number(path))):
            taken = step.with_name(f"taken_{step.name}")
            try:
                # Renamed first, so that its engine does not remove it while it is read.
                step.rename(taken)
            except FileNotFoundError:
                continue
            arrays = {path.stem: _tensor(path) for path in sorted(taken.iterdir())}
            shutil.rmtree(taken)
            yield DebugTensorsPerIteration(_number(step), arrays)


def _number(step: Path) -> int:
    return int(step.name.removeprefix(DEBUG_STEP))


def _tensor(path: Path) -> "torch.Tensor":
    import numpy as np
    import torch

    return torch.from_numpy(np.load(path, allow_pickle=False))
