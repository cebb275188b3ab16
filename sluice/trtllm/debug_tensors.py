"""Arrays of engines' steps, which an executor's engines write to files."""

import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.settings.engine import DEBUG_INPUTS, DEBUG_OUTPUTS, DEBUG_STEP
from sluice.trtllm.config import DebugConfig
from sluice.trtllm.errors import OptionError, UnsupportedOptionError
from sluice.trtllm.statistics import DebugTensorsPerIteration

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sluice.trtllm")


def debug_names(config: DebugConfig | None) -> list[str]:
    """Raises UnsupportedOptionError for a name that is not known, OptionError for a number of iterations below 0."""
    if config is None:
        return []
    if config.debug_tensors_max_iterations < 0:
        value = config.debug_tensors_max_iterations
        raise OptionError(f"DebugConfig.debug_tensors_max_iterations is {value}, must be at least 0")
    named = list(config.debug_tensor_names or ())
    known = (*DEBUG_INPUTS, *DEBUG_OUTPUTS)
    for name in named:
        if name not in known:
            reason = f"an engine has no such tensor; it has {', '.join(known)}"
            raise UnsupportedOptionError(f"DebugConfig.debug_tensor_names: {name!r}", reason)
    inputs = DEBUG_INPUTS if config.debug_input_tensors else ()
    outputs = DEBUG_OUTPUTS if config.debug_output_tensors else ()
    return [name for name in known if name in (*named, *inputs, *outputs)]


class DebugFolder:
    """A folder of this executor's own. With a number of iterations it is a queue of the newest steps, and removed at
    the end; without, it stays."""

    def __init__(self, names: list[str], max_iterations: int) -> None:
        """Raises OSError."""
        self._path = Path(tempfile.mkdtemp(prefix="sluice_debug_"))
        self._is_queue = max_iterations > 0
        self.engine_args: dict[str, Any] = {"debug_tensors": names, "debug_folder": str(self._path)}
        if self._is_queue:
            self.engine_args["debug_max_steps"] = max_iterations
            # Programs need not shut an executor down.
            self._remove = weakref.finalize(self, shutil.rmtree, self._path, ignore_errors=True)
        else:
            log.warning("debug tensors are written to %s", self._path)

    @staticmethod
    def of(config: DebugConfig | None) -> "DebugFolder | None":
        """None if no tensors are wanted. Raises as `debug_names`."""
        names = debug_names(config)
        return DebugFolder(names, config.debug_tensors_max_iterations) if config is not None and names else None

    def take(self) -> list[DebugTensorsPerIteration]:
        """The newest steps since the last call, oldest first; empty if they are kept as files."""
        return list(self._taken()) if self._is_queue else []

    def close(self) -> None:
        """Once no engine runs."""
        if self._is_queue:
            self._remove()

    def _taken(self) -> Iterator[DebugTensorsPerIteration]:
        for step in sorted(self._path.glob(f"*/{DEBUG_STEP}*"), key=lambda path: (path.parent.name, _number(path))):
            taken = step.with_name(f"taken_{step.name}")
            try:
                # From here on its engine does not remove it.
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
