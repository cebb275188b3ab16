"""Runs many requests, a bounded number at a time, with a progress bar."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sluice.executor.request import GenerationRequest, is_embeds
from sluice.executor.result import GenerationResult
from sluice.executor.sampling import SamplingParams
from sluice.executor.waiting import SLICE_SECONDS

T = TypeVar("T")

PER_PROMPT = ("lora_request", "prompt_adapter_request", "kv_cache_retention_config", "cache_salt")


class BatchRun:
    """`results` holds those of the requests started so far, in order."""

    def __init__(self, submit: Callable[..., GenerationResult], max_in_flight: int) -> None:
        """`submit`: (request, on_end=...) starts it; `on_end` is called in another thread once its end can be read."""
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}, must be at least 1")
        self.results: list[GenerationResult] = []
        self._submit = submit
        self._max_in_flight = max_in_flight
        self._ended: SimpleQueue[GenerationResult] = SimpleQueue()
        self._read = 0

    def run(self, requests: Sequence[GenerationRequest], show: bool) -> None:
        """Returns when all have ended. Raises RequestError for the first that fails, while others still run."""
        with _progress(len(requests), show) as advance:
            for request in requests:
                if len(self.results) - self._read == self._max_in_flight:
                    self._await_one(advance)
                self.results.append(self._submit(request, on_end=self._ended.put))
            while self._read < len(self.results):
                self._await_one(advance)

    def _await_one(self, advance: Callable[[], None]) -> None:
        result = None
        while result is None:
            # In slices: a signal that arrives just before an endless wait would not interrupt it.
            with suppress(Empty):
                result = self._ended.get(timeout=SLICE_SECONDS)
        self._read += 1
        # Ended already: this raises its error, if any, and does not wait.
        result.result()
        advance()


def is_batch(inputs: Any) -> bool:
    """Whether these are several prompts, not a single text, list of token ids or list of chat messages, or rows."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        return False
    return not inputs or isinstance(inputs[0], Sequence) or is_embeds(inputs[0])


def batch_requests(
    prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams], options: dict[str, Any]
) -> list[GenerationRequest]:
    """`options` apply to all; those of PER_PROMPT may be sequences, one value per prompt. Raises ValueError."""
    count = len(prompts)
    own = {name: per_prompt(name, options[name], count) for name in PER_PROMPT if name in options}
    all_params = per_prompt("sampling_params", params, count)
    return [
        GenerationRequest(prompt, all_params[i], **options | {name: values[i] for name, values in own.items()})
        for i, prompt in enumerate(prompts)
    ]


def per_prompt(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    """`count` values, from one or a sequence of that length. Raises ValueError."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries, inputs have {count}")
    return value


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[], None]]:
    if not show:
        yield lambda: None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
