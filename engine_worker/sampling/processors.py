"""Logits processors: the operator's functions that change the logits of sequences whose requests name them.

They are called with the arguments of TensorRT-LLM's logits post-processors:
`function(request_id, logits, token_ids, stream, client_id)`. A batched one gets a list of each, but a single stream.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.backend import first_line
from engine_worker.sampling.callbacks import Callback, CallbackError
from sluice.settings.engine import BATCHED, ProcessorNames
from sluice.settings.names import find_function
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.requests import Submit

Warn = Callable[[str, str], None]
"""(log event, reason)."""
Processor = Callable[[str, Tensor, list[list[int]], int | None, int | None], None]
"""`logits`: [1, 1, vocab] float32, to be changed in place. `token_ids`: one list, prompt and output, not to be changed.
`stream`: the CUDA stream that the logits belong to; None on a CPU."""
BatchedProcessor = Callable[[list[str], list[Tensor], list[list[list[int]]], int | None, list[int | None]], None]


def ignore_warning(_event: str, _reason: str) -> None:
    """A `Warn` that drops the warnings."""


class Processors(NamedTuple):
    """The processors of the settings."""

    named: Mapping[str, Processor] = {}
    batched: BatchedProcessor | None = None
    warn: Warn = ignore_warning


NO_PROCESSORS = Processors()


def find_processors(names: ProcessorNames, warn: Warn) -> Processors:
    """Import the functions that the settings name as module:function; functions with an ipc:// address are called in
    the user's program. Raises ValueError."""
    seconds = names.logits_processor_timeout
    named: dict[str, Processor] = {}
    for name, value in names.logits_processors.items():
        callback = Callback.of(value, seconds)
        named[name] = find_function(f"logits_processors: {name}", value) if callback is None else callback.one
    batched: BatchedProcessor | None = None
    if (value_of_batched := names.logits_processor_batched) is not None:
        callback = Callback.of(value_of_batched, seconds)
        batched = find_function("logits_processor_batched", value_of_batched) if callback is None else callback.batch
    return Processors(named, batched, warn)


class Processing(NamedTuple):
    """Arguments for the logits processors of one sequence."""

    names: tuple[str, ...]
    request_id: str
    client_id: int | None
    tokens: list[int]
    """Prompt and output."""

    @staticmethod
    def of(submit: Submit) -> "list[Processing | None]":
        """One per sequence; None for sequences that ended in an earlier attempt, or if there are no processors."""
        names = submit.sampling.logits_processors
        if not names:
            return [None] * submit.n
        ids = [submit.name] if submit.n == 1 else [f"{submit.name}/{i}" for i in range(submit.n)]
        client_id = None if submit.extras is None else submit.extras.client_id
        return [
            None if index in submit.ended else Processing(names, request_id, client_id, list(submit.prompt))
            for index, request_id in enumerate(ids)
        ]


class ProcessedRow(NamedTuple):
    draw: int
    """Index in the step."""
    logits: Tensor
    """[vocab] float32, used by this draw alone."""
    processing: Processing


def run_processors(processors: Processors, rows: Sequence[ProcessedRow]) -> dict[int, Fault]:
    """Change the logits of `rows`, at least one, in place; return the faults by draw.

    Each row's processors run in the order that its request names them. The batched one is called once for all rows that
    have it at the same index.
    """
    faults: dict[int, Fault] = {}
    stream, warn = _stream(rows[0].logits.device), processors.warn
    for index in range(max(len(row.processing.names) for row in rows)):
        batch = []
        for row in rows:
            name = row.processing.names[index] if index < len(row.processing.names) else None
            if name is None or row.draw in faults:
                continue
            if name == BATCHED:
                batch.append(row)
            else:
                faults |= _call_named(processors.named[name], name, row, stream, warn)
        if batch and processors.batched is not None:
            faults |= _call_batched(processors.batched, batch, stream, warn)
    return faults


def _call_named(function: Processor, name: str, row: ProcessedRow, stream: int | None, warn: Warn) -> dict[int, Fault]:
    processing = row.processing
    try:
        function(processing.request_id, row.logits.view(1, 1, -1), [processing.tokens], stream, processing.client_id)
    except BaseException as error:  # noqa: BLE001 - an exception of the user's code ends only this sequence
        return _failed(name, [row], error, warn)
    return {}


def _call_batched(
    function: BatchedProcessor, rows: Sequence[ProcessedRow], stream: int | None, warn: Warn
) -> dict[int, Fault]:
    try:
        function(
            [row.processing.request_id for row in rows],
            [row.logits.view(1, 1, -1) for row in rows],
            [[row.processing.tokens] for row in rows],
            stream,
            [row.processing.client_id for row in rows],
        )
    except BaseException as error:  # noqa: BLE001 - an exception of the user's code ends only these sequences
        return _failed(BATCHED, rows, error, warn)
    return {}


def _failed(name: str, rows: Sequence[ProcessedRow], error: BaseException, warn: Warn) -> dict[int, Fault]:
    outcome = error.outcome if isinstance(error, CallbackError) else f"raised {type(error).__name__}"
    warn("logits_processor_failed", f"{name} {outcome}: {first_line(error)}")
    fault = Fault(ErrorCode.PROCESSOR_FAILED.name, f"the logits processor {name!r} {outcome}")
    return dict.fromkeys((row.draw for row in rows), fault)


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
