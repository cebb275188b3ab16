"""How a service's loop shows that it turns: to its own probes, and to the launcher."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

PULSE_VARIABLE = "SLUICE_PULSE_FILE"
"""A file that the launcher looks at: it kills a service whose loop has not touched it for long."""
FILE_SECONDS = 1.0


class ProgressBeacon:
    """One thread touches, any may read."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.turns = 0
        """So often it was touched."""
        file = environment.get(PULSE_VARIABLE)
        self._file = Path(file) if file else None
        self._clock = clock
        self._turned_at = self._moved_at = clock()
        self._filed_at = float("-inf")

    @property
    def still(self) -> float:
        """Seconds since the loop last turned."""
        return self._clock() - self._turned_at

    @property
    def stuck(self) -> float:
        """Seconds since it last got something done, or had nothing to do."""
        return self._clock() - self._moved_at

    def touch(self, moving: bool = True) -> None:
        """The loop has turned; `moving`: and got on with its work, if there was any."""
        self.turns += 1
        now = self._turned_at = self._clock()
        if moving:
            self._moved_at = now
        if self._file is not None and now - self._filed_at >= FILE_SECONDS:
            self._filed_at = now
            # Its folder goes with the launcher, and a full disk or a lack of descriptors must not end the loop.
            with suppress(OSError):
                self._file.touch()
