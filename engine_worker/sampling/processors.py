"""Logits post-processors: functions of the operator that change the logits of sequences that ask for them.

Called with the arguments of TensorRT-LLM's logits post-processors:
`function(request_id, logits, token_ids, stream, client_id)`, or, if batched, with a list of each (but one stream).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.backend import first_line
from engine_worker.sampling.callbacks import Callback, CallbackError
from engine_worker.sampling.program import Processing
from sluice.ring.callbacks import SCHEME
from sluice.ring.errors import ErrorCode, Fault
from sluice.ring.names import find
from sluice.settings.engine import BATCHED, ProcessorNames

Warn = Callable[[str, str], None]
"""(log event, reason)."""
Processor = Callable[[str, Tensor, list[list[int]], int | None, int | None], None]
"""`logits`: [1, 1, vocab] float32, to be changed in place. `token_ids`: one list, prompt and output, not to be changed.
`stream`: the CUDA stream that the logits belong to; None on a CPU."""
BatchedProcessor = Callable[[list[str], list[Tensor], list[list[list[int]]], int | None, list[int | None]], None]


def ignore(_event: str, _reason: str) -> None:
    """A warning that nobody reads."""


class Processors(NamedTuple):
    """Those of the settings."""

    named: Mapping[str, Processor] = {}
    batched: BatchedProcessor | None = None
    warn: Warn = ignore


NO_PROCESSORS = Processors()


def find_processors(names: ProcessorNames, warn: Warn) -> Processors:
    """Imports the functions that the settings name; those of a user's program are called there. Raises ValueError."""
    seconds = names.logits_processor_timeout
    found = {
        name: Callback(value, seconds).one if value.startswith(SCHEME) else _find(f"logits_processors: {name}", value)
        for name, value in names.logits_processors.items()
    }
    batched = names.logits_processor_batched
    if batched is None:
        return Processors(found, None, warn)
    if batched.startswith(SCHEME):
        return Processors(found, Callback(batched, seconds).batch, warn)
    return Processors(found, _find("logits_processor_batched", batched), warn)


def _find(setting: str, value: str) -> Callable[..., None]:
    try:
        found: Callable[..., None] = find(value)
    except ValueError as error:
        raise ValueError(f"{setting}: {value!r} cannot be used: {error}") from error
    if not callable(found):
        raise ValueError(f"{setting}: {value!r} cannot be used: it is not callable")
    return found


class ProcessedRow(NamedTuple):
    draw: int
    """Index in the step."""
    logits: Tensor
    """[vocab] float32, of this draw alone."""
    processing: Processing


def run_processors(processors: Processors, rows: Sequence[ProcessedRow]) -> dict[int, Fault]:
    """Change the logits of the rows, at least one, in place; returns the faults by draw. Each row's processors run in
    the order of the request, the batched one once for all rows that have it in the same place."""
    faults: dict[int, Fault] = {}
    stream, warn = _stream(rows[0].logits.device), processors.warn
    for place in range(max(len(row.processing.names) for row in rows)):
        batch = []
        for row in rows:
            name = row.processing.names[place] if place < len(row.processing.names) else None
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
    its = row.processing
    try:
        function(its.request_id, row.logits.view(1, 1, -1), [its.tokens], stream, its.client_id)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises ends this sequence alone
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
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises ends these sequences alone
        return _failed(BATCHED, rows, error, warn)
    return {}


def _failed(name: str, rows: Sequence[ProcessedRow], error: BaseException, warn: Warn) -> dict[int, Fault]:
    outcome = error.outcome if isinstance(error, CallbackError) else f"raised {type(error).__name__}"
    warn("logits_processor_failed", f"{name} {outcome}: {first_line(error)}")
    fault = Fault(ErrorCode.PROCESSOR_FAILED.name, f"the logits processor {name!r} {outcome}")
    return dict.fromkeys((row.draw for row in rows), fault)


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
