"""Writes the arrays of each step to files, for debugging: FOLDER/ENGINE/iteration_N/NAME.npy."""

import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.runner.batch import rotary_positions
from engine_worker.sampling.processors import Warn
from engine_worker.step import Slice
from sluice.settings.engine import DEBUG_STEP, DebugOptions

Arrays = Mapping[str, NDArray[Any]]


class DebugStep(NamedTuple):
    """A step's inputs as known at its launch: plain copies, since the engine's lists may change."""

    number: int
    inputs: dict[str, NDArray[Any]]
    follows: Mapping[int, int]
    """For each token that the previous step samples: its draw in that step."""

    @classmethod
    def of(cls, number: int, slices: Sequence[Slice]) -> "DebugStep":
        ends = list(accumulate(len(part.tokens) for part in slices))
        starts = np.array([part.start for part in slices], np.int64)
        counts = np.array([len(part.tokens) for part in slices], np.int64)
        positions = [range(part.start, part.start + len(part.tokens)) for part in slices]
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.fromiter(chain.from_iterable(part.tokens for part in slices), np.int64, ends[-1]),
            "position_ids": rotary_positions(slices, np.fromiter(chain.from_iterable(positions), np.int64, ends[-1])),
            "sequence_length": (starts + counts).astype(np.int32),
            "host_past_key_value_lengths": starts.astype(np.int32),
            "last_token_ids": np.array(ends, np.int32),
        }
        follows = {end - 1: part.follows for part, end in zip(slices, ends, strict=True) if part.follows is not None}
        return cls(number, inputs, follows)

    def complete(self, logits: Tensor | None, previous_tokens: Sequence[int] | None) -> Arrays:
        """logits [R, vocab]. `previous_tokens`: tokens of the previous step, if it samples some tokens of this one."""
        if previous_tokens is not None:
            for token, draw in self.follows.items():
                self.inputs["input_ids"][token] = previous_tokens[draw]
        return self.inputs if logits is None else {**self.inputs, "logits": logits.cpu().numpy()}


class DebugTensors:
    """Keeps the newest steps within the limits of the settings. A file system error stops the writing, not the
    engine."""

    def __init__(self, options: DebugOptions, engine: str, warn: Warn) -> None:
        """Removes the steps that an earlier process of this engine has written. Raises OSError."""
        self._folder = Path(options.debug_folder or "") / engine
        self._options = options
        self._warn = warn
        self._launched = 0
        self._kept: deque[tuple[Path, int]] = deque()
        """Folders with their sizes in bytes, oldest first."""
        self._size = 0
        """Sum of these sizes."""
        self._failed = False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for earlier in self._folder.glob(f"*{DEBUG_STEP}*"):
            shutil.rmtree(earlier)

    @staticmethod
    def of(options: DebugOptions, engine: str, warn: Warn) -> "DebugTensors | None":
        """None without `debug_tensors`. Raises ValueError if the folder cannot be used."""
        if not options.debug_tensors:
            return None
        try:
            return DebugTensors(options, engine, warn)
        except OSError as error:
            raise ValueError(f"debug_folder: {options.debug_folder} cannot be used: {error}") from error

    def launch(self, slices: Sequence[Slice]) -> DebugStep:
        """Number the step and copy its inputs."""
        self._launched += 1
        return DebugStep.of(self._launched - 1, slices)

    def write(self, step: DebugStep, logits: Tensor | None, previous_tokens: Sequence[int] | None) -> None:
        """Write the step's arrays that the settings name. Arguments: see `DebugStep.complete`."""
        if self._failed:
            return
        complete = step.complete(logits, previous_tokens)
        arrays = {name: array for name, array in complete.items() if name in self._options.debug_tensors}
        try:
            self._write(self._folder / f"{DEBUG_STEP}{step.number}", arrays)
        except OSError as error:
            self._failed = True
            self._warn("debug_tensors_failed", str(error))

    def _write(self, folder: Path, arrays: Arrays) -> None:
        # Renamed when complete, so that readers see only complete steps.
        unfinished = folder.with_name(f".{folder.name}")
        unfinished.mkdir()
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array, allow_pickle=False)
        unfinished.rename(folder)
        size = sum(array.nbytes for array in arrays.values())
        self._kept.append((folder, size))
        self._size += size
        most, largest = self._options.debug_max_steps, self._options.debug_max_size
        while len(self._kept) > most or (self._size > largest and len(self._kept) > 1):
            oldest, size = self._kept.popleft()
            self._size -= size
            # A reader may have removed it.
            shutil.rmtree(oldest, ignore_errors=True)
