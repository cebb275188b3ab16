"""`best_of` above `n`: stream all outputs, then choose the best of them.

The ring supports `best_of` too, but only in Generate, which starts over when its router is lost, while a stream
resumes. And the ring ranks outputs by the sum of log-probabilities, OpenAI's API by their mean.
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
    """Options of a stream that returns every output, with the log-probabilities by which they are compared."""
    rest = {name: value for name, value in options.items() if name != "best_of"}
    return {"logprobs": 0} | rest | {"n": options["best_of"]}


def chosen(generation: Generation, options: Mapping[str, Any]) -> Generation:
    """The `n` most likely outputs, best first. `options`: as the caller gave them."""
    best = sorted(generation.outputs, key=_by_likelihood)[: options.get("n") or 1]
    shown = "logprobs" in options
    outputs = (
        replace(output, index=index, logprobs=output.logprobs if shown else ()) for index, output in enumerate(best)
    )
    return replace(generation, outputs=tuple(outputs))


def _by_likelihood(output: Output) -> tuple[bool, float, int]:
    """Sort key: most likely per token first. Outputs that were stopped before their end come last."""
    mean = (output.cumulative_logprob or 0.0) / max(1, len(output.logprobs))
    # NaN would make the order undefined.
    return output.finish_reason in STOPPED, math.inf if math.isnan(mean) else -mean, output.index
