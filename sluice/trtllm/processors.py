"""Logits post-processors of a program, in the form that the executor's engines call."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sluice.executor.callbacks import Processor, module_name
from sluice.executor.submissions import request_number
from sluice.trtllm.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_STREAM = 0
"""Of CUDA: logits are in host memory, so any stream will do."""
ARGUMENTS = 5
"""Older versions of TensorRT-LLM pass all but the last, the client id."""


def processor(option: str, given: object) -> Processor | str:
    """Its name if the engine can import it, else what the engine calls in this program. Raises
    UnsupportedOptionError."""
    if isinstance(given, str):
        return given
    if not callable(given):
        raise UnsupportedOptionError(f"LogitsPostProcessorConfig.{option} = {given!r}", "it must be a function")
    complete = _takes(given, ARGUMENTS)
    name = module_name(given) if complete else None
    return name or (_one(given, complete) if option != "processor_batched" else _batched(given, complete))


def _one(function: Callable[..., Any], complete: bool) -> Processor:
    def call(name: str, logits: "Tensor", ids: list[list[int]], _stream: None, client_id: int | None) -> None:
        arguments = request_number(name), logits, ids, DEFAULT_STREAM, client_id
        function(*(arguments if complete else arguments[:-1]))

    return call


def _batched(function: Callable[..., Any], complete: bool) -> Processor:
    def call(
        names: list[str],
        logits: "list[Tensor]",
        ids: list[list[list[int]]],
        _stream: None,
        client_ids: list[int | None],
    ) -> None:
        arguments = list(map(request_number, names)), logits, ids, DEFAULT_STREAM, client_ids
        function(*(arguments if complete else arguments[:-1]))

    return call


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # Some functions in C do not tell.
        return True
    return True
