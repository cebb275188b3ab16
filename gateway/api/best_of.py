"""`best_of` above `n`: all outputs as a stream, and the best of them.

A stream goes on where it was when its router is lost. The ring's own choice is by Generate alone, which begins anew
then, and by the sum of log-probabilities; that of OpenAI's API is by their mean.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice.client import FinishReason, Generation, Output

STOPPED = (FinishReason.ABORTED, FinishReason.TIME_LIMIT)


def wants_choice(options: Mapping[str, Any]) -> bool:
    return bool((options.get("n") or 1) < (options.get("best_of") or 0))


def all_outputs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a stream that has every output, with what they are compared by."""
    rest = {name: value for name, value in options.items() if name != "best_of"}
    return {"logprobs": 0} | rest | {"n": options["best_of"]}


def chosen(found: Generation, options: Mapping[str, Any]) -> Generation:
    """The `n` most likely outputs, the best first. `options`: the caller's."""
    best = sorted(found.outputs, key=_by_likelihood)[: options.get("n") or 1]
    shown = "logprobs" in options
    outputs = (
        replace(output, index=index, logprobs=output.logprobs if shown else ()) for index, output in enumerate(best)
    )
    return replace(found, outputs=tuple(outputs))


def _by_likelihood(output: Output) -> tuple[bool, float, int]:
    """Sort key, the most likely per token first. Those that were stopped before their end come last."""
    mean = (output.cumulative_logprob or 0.0) / max(1, len(output.logprobs))
    # NaN orders nothing.
    return output.finish_reason in STOPPED, math.inf if math.isnan(mean) else -mean, output.index
