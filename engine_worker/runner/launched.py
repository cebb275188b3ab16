"""A launched step, whose results the engine's thread waits for."""

import time
from collections.abc import Mapping
from concurrent.futures import Future

from engine_worker.runner.finished import Finished
from engine_worker.runner.results import SampledResults
from engine_worker.runner.rows import RequestedRows
from engine_worker.step import Drawn, KeptRows


class WaitTimer:
    """Context manager around waits of the engine's thread; other threads may read `since`."""

    def __init__(self) -> None:
        self.since: float | None = None
        """Start of the wait in progress, by time.monotonic; None: not waiting."""

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.since = None


class LaunchedStep:
    """See `engine_worker.protocol.Launched`."""

    def __init__(
        self,
        results: "Future[SampledResults | None] | Finished[SampledResults | None]",
        missing: Mapping[int, str],
        rows: RequestedRows | None,
        waiting: WaitTimer,
    ) -> None:
        """`missing`: see `missing_adapters`; complete before `results` are."""
        self._results = results
        self._missing = missing
        self._rows = rows
        self._waiting = waiting

    def collect(self) -> list[Drawn]:
        with self._waiting:
            results = self._results.result()
            return [] if results is None else results.drawn()

    def missing_adapters(self) -> Mapping[int, str]:
        return self._missing

    def prompt_logprobs(self) -> list[bytes]:
        with self._waiting:
            return [] if self._rows is None else self._rows.prompt_logprobs()

    def kept_rows(self) -> list[list[KeptRows]]:
        with self._waiting:
            return [] if self._rows is None else self._rows.kept_rows()

    def results(self) -> SampledResults | None:
        """Wait until the step has been queued on the device. None if it failed or samples nothing."""
        return None if self._results.exception() is not None else self._results.result()
