"""The results of a run, named as in the JSON files of `vllm bench serve`."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from sluice.loadgen.run import Measured
from sluice.loadgen.target import Outcome

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token after the first, inter-token latency (between chunks), end-to-end
latency."""
GOALS = ("ttft", "tpot", "e2el")
"""Metrics that goodput may limit, in milliseconds: those that have one value per request."""


def summarize(rounds: Sequence[Measured], percentiles: Sequence[float], goals: Mapping[str, float]) -> dict[str, Any]:
    """The results of one server, over all of its rounds."""
    measured = Measured.joined(rounds)
    succeeded = [outcome for outcome in measured.outcomes if outcome.succeeded]
    seconds = measured.seconds
    prompt = sum(outcome.prompt_tokens for outcome in succeeded)
    output = sum(outcome.output_tokens for outcome in succeeded)
    within_goals = sum(_meets(outcome, goals) for outcome in succeeded)
    results: dict[str, Any] = {
        "duration": seconds,
        "completed": len(succeeded),
        "failed": len(measured.outcomes) - len(succeeded),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": _per_second(len(succeeded), seconds),
        "request_goodput": _per_second(within_goals, seconds) if goals else None,
        "output_throughput": _per_second(output, seconds),
        "output_throughput_of_rounds": [_output_throughput(measured) for measured in rounds],
        "total_token_throughput": _per_second(prompt + output, seconds),
        "max_output_tokens_per_s": _max_tokens_per_second(succeeded),
        "max_concurrent_requests": _max_concurrency(succeeded),
    }
    for name, samples in _samples(succeeded).items():
        results |= _statistics(name, samples, percentiles)
    return results


def _output_throughput(measured: Measured) -> float:
    tokens = sum(outcome.output_tokens for outcome in measured.outcomes if outcome.succeeded)
    return _per_second(tokens, measured.seconds)


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Lists with one entry per request; times in seconds."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens if outcome.succeeded else 0 for outcome in outcomes],
        "ttfts": [outcome.first_token for outcome in outcomes],
        "itls": [outcome.gaps for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "queue_times": [outcome.queued for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def percentile(samples: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation, like numpy.percentile; 0 without samples."""
    if not len(samples):
        return 0.0
    ordered = sorted(samples)
    index = (len(ordered) - 1) * percent / 100
    low, high = math.floor(index), math.ceil(index)
    return ordered[low] + (ordered[high] - ordered[low]) * (index - low)


def percentile_name(percent: float) -> str:
    return f"p{percent:g}"


def _samples(succeeded: Sequence[Outcome]) -> dict[str, list[float]]:
    """Samples of each metric, in seconds."""
    return {
        "ttft": [outcome.first_token for outcome in succeeded if outcome.arrivals],
        "tpot": [outcome.per_token for outcome in succeeded if outcome.output_tokens > 1],
        "itl": [gap for outcome in succeeded for gap in outcome.gaps],
        "e2el": [outcome.latency for outcome in succeeded],
    }


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    samples = [1000 * sample for sample in seconds]
    return {
        f"mean_{name}_ms": statistics.fmean(samples) if samples else 0.0,
        f"median_{name}_ms": percentile(samples, 50),
        f"std_{name}_ms": statistics.pstdev(samples) if samples else 0.0,
    } | {f"{percentile_name(percent)}_{name}_ms": percentile(samples, percent) for percent in percentiles}


def _meets(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    """goals: limits in milliseconds."""
    seconds = {"ttft": outcome.first_token, "tpot": outcome.per_token, "e2el": outcome.latency}
    return all(1000 * seconds[name] <= limit for name, limit in goals.items())


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _max_tokens_per_second(succeeded: Sequence[Outcome]) -> float:
    """Most output tokens in one of the run's seconds."""
    start = min((outcome.start for outcome in succeeded), default=0.0)
    tokens_in: Counter[int] = Counter()
    for outcome in succeeded:
        for arrival, tokens in zip(outcome.arrivals, outcome.tokens, strict=True):
            tokens_in[int(arrival - start)] += tokens
    return float(max(tokens_in.values(), default=0))


def _max_concurrency(succeeded: Sequence[Outcome]) -> int:
    """Most requests in flight at one time."""
    # At equal times -1 sorts before 1: a request that ends as another one starts is not concurrent with it.
    changes = sorted([(outcome.start, 1) for outcome in succeeded] + [(outcome.end, -1) for outcome in succeeded])
    return max(accumulate(change for _, change in changes), default=0)
