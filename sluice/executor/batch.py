"""Run many requests, a bounded number at a time, with a progress bar."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sluice.client.values import is_array
from sluice.executor.request import GenerationRequest, is_embeds
from sluice.executor.result import GenerationResult
from sluice.executor.sampling import SamplingParams
from sluice.executor.waiting import SLICE_SECONDS

T = TypeVar("T")

PER_PROMPT = ("client_id", "lora_request", "prompt_adapter_request", "kv_cache_retention_config", "cache_salt")
"""Options that can be a list with one value per prompt."""
LISTS_PER_PROMPT = ("draft_token_ids", "draft_logits", "images")
"""Options that are a list or an array for one prompt, so that several prompts need one for each."""


class BatchRun:
    """A run of many requests, at most `max_in_flight` at a time."""

    def __init__(self, submit: Callable[..., GenerationResult], max_in_flight: int) -> None:
        """`submit(request, on_end=…)` starts a request; `on_end` is called in another thread once its end can be read.

        Raises ValueError.
        """
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}, must be at least 1")
        self.results: list[GenerationResult] = []
        """Results of the requests started so far, in order."""
        self._submit = submit
        self._max_in_flight = max_in_flight
        self._ended: SimpleQueue[GenerationResult] = SimpleQueue()
        self._read = 0

    def run(self, requests: Sequence[GenerationRequest], show: bool) -> None:
        """Run all requests to their end. Raises RequestError for the first that fails, while others still run."""
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
            # In slices, because a signal that arrives just before an endless wait would not interrupt it.
            with suppress(Empty):
                result = self._ended.get(timeout=SLICE_SECONDS)
        self._read += 1
        # The request has ended, so this does not wait; it raises the request's error, if any.
        result.result()
        advance()


def is_batch(inputs: Any) -> bool:
    """Whether `inputs` is a list of prompts, not one text, list of token ids, list of chat messages or embeddings."""
    if is_array(inputs):
        return len(inputs.shape) > 1
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        return False
    return not inputs or isinstance(inputs[0], Sequence) or is_array(inputs[0]) or is_embeds(inputs[0])


def batch_requests(
    prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams], options: dict[str, Any]
) -> list[GenerationRequest]:
    """One request per prompt. `params`, and the options in PER_PROMPT, can be sequences with one value per prompt.

    Raises ValueError for a sequence of another length, TypeError for an invalid option.
    """
    count = len(prompts)
    for name in LISTS_PER_PROMPT:
        if options.get(name) is not None and not isinstance(options[name], list | tuple):
            raise TypeError(f"{name} must be a list with one value for each of the {count} inputs")
    names = [name for name in (*PER_PROMPT, *LISTS_PER_PROMPT) if options.get(name) is not None]
    varying = {name: per_prompt(name, options[name], count) for name in names}
    all_params = per_prompt("sampling_params", params, count)
    return [
        GenerationRequest(prompt, all_params[i], **options | {name: values[i] for name, values in varying.items()})
        for i, prompt in enumerate(prompts)
    ]


def per_prompt(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    """One value per prompt, from a single value or a sequence of `count` values. Raises ValueError."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries, must have one for each of the {count} inputs")
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
