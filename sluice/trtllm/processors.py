"""Logits post-processors in the form that `GenerationExecutor.create` expects."""

import inspect
from collections.abc import Callable
from typing import Any

from sluice.executor.callbacks import Processor, module_name
from sluice.executor.session import request_number
from sluice.trtllm.options import OptionError, UnsupportedOptionError
from sluice.trtllm.request import Request

DYNAMIC = "dynamic"
"""Name of the processor that calls `Request.logits_post_processor`. TensorRT-LLM reserves this name too."""
DEFAULT_STREAM = 0
"""The CUDA stream that functions receive: any one will do, since the logits are in host memory."""
ARGUMENTS = 5
"""Older versions of TensorRT-LLM pass one less: they have no client id."""


def processor(option: str, function: object, *, batched: bool = False) -> Processor | str:
    """The name of a function that the engine can import; for others, a function for the engine to call in this program.

    `batched`: the function is called with lists. Raises UnsupportedOptionError for anything but a function or a name.
    """
    if isinstance(function, str):
        return function
    found = _callable(option, function)
    importable = module_name(found) if _has_client_id(found) else None
    return importable or _with_numbers(found, batched=batched)


def request_processor(request: Request) -> Processor | None:
    """The function of a single request, which the engine calls in this program.

    Raises UnsupportedOptionError for anything but a function, OptionError if the request also names one.
    """
    if request.logits_post_processor is None:
        return None
    if request.logits_post_processor_name is not None:
        raise OptionError("Request.logits_post_processor and logits_post_processor_name cannot be combined")
    function = _callable("Request.logits_post_processor", request.logits_post_processor)
    # The import takes seconds, and the engine's call has a time limit.
    import torch  # noqa: F401

    return _with_numbers(function, batched=False)


def _callable(option: str, function: object) -> Callable[..., Any]:
    if not callable(function):
        raise UnsupportedOptionError(f"{option} = {function!r}", "it must be a function")
    return function


def _with_numbers(function: Callable[..., Any], *, batched: bool) -> Processor:
    """Calls the function with TensorRT-LLM's request ids, which are numbers, and with its stream."""
    has_client_id = _has_client_id(function)

    def call(names: Any, logits: Any, ids: Any, _stream: None, client_ids: Any) -> None:
        numbers = list(map(request_number, names)) if batched else request_number(names)
        arguments = numbers, logits, ids, DEFAULT_STREAM, client_ids
        function(*(arguments if has_client_id else arguments[:-1]))

    return call


def _has_client_id(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(*range(ARGUMENTS))
    except TypeError:
        return False
    except ValueError:
        # Some functions written in C have no signature.
        return True
    return True
