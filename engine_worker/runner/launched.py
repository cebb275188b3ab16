"""A launched step, whose results are copied to the host; the engine's thread waits for them."""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future

import torch

from engine_worker.attention.saver import Saved
from engine_worker.runner.batch import map_tensors
from engine_worker.runner.finished import Finished
from engine_worker.runner.rows import RequestedRows
from engine_worker.sampling.host import on_host
from engine_worker.sampling.sampler import RuleResults, Sampled
from engine_worker.step import Draw, Drawn, KeptRows

COMPLETE = Drawn(-1, complete=True)
POSTPONED = Drawn(-1, postponed=True)


class SampledResults:
    """The results of a step. On a GPU the constructor starts asynchronous copies to pinned memory."""

    def __init__(self, sampled: Sampled, draws: list[Draw], rule_results: RuleResults, *, overlapped: bool) -> None:
        """`rule_results`: say which draws' tokens are invalid. `overlapped`: the next step is queued before the
        host waits for this one, so a late wake-up costs nothing."""
        self.tokens = sampled.tokens
        """[D] int64, on the device."""
        self._draws = draws
        _, _, self._faults, self._complete, self._later = rule_results
        self._copied: torch.cuda.Event | None = None
        if self.tokens.device.type != "cpu":
            sampled = map_tensors(sampled, on_host)
            # CUDA spins while it waits, which takes a core that router and detokenizer may need; a blocking wait wakes
            # up about 50 µs late. Spin if there is a `short`, since the next step is queued only after that is known.
            self._copied = torch.cuda.Event(blocking=overlapped and sampled.short is None)
            self._copied.record()
        self._sampled = sampled

    def drawn(self) -> list[Drawn]:
        """The results, one per draw. Waits for the device."""
        self._wait()
        results = self._sampled.results(self._draws)
        for draw in self._later:
            results[draw] = POSTPONED
        for draw, fault in self._faults.items():
            results[draw] = Drawn(0, fault=fault)
        for draw in self._complete:
            results[draw] = COMPLETE
        return results

    def tokens_on_host(self) -> list[int]:
        """The tokens [D]. Waits for the device."""
        self._wait()
        tokens: list[int] = self._sampled.tokens.tolist()
        return tokens

    def short(self) -> bool:
        """See `Sampled.short`. Waits for the device only if a draw has a filter for which candidates may be too few."""
        if self._sampled.short is None:
            return False
        self._wait()
        return bool(self._sampled.short)

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


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
        saved: Iterable[Saved],
        waiting: WaitTimer,
    ) -> None:
        """`missing`: see `missing_adapters`. It and `saved` are complete before `results` are."""
        self._results = results
        self._missing = missing
        self._rows = rows
        self._saved = saved
        self._waiting = waiting

    def collect(self) -> list[Drawn]:
        with self._waiting:
            results = self._results.result()
            drawn = [] if results is None else results.drawn()
            # A step is complete once its copies are on the host.
            for saved in self._saved:
                saved.land()
            return drawn

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
